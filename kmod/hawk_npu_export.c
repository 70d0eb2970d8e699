// SPDX-License-Identifier: GPL-2.0
/*
 * Ranges of regions as dma-bufs.
 *
 * All exports of a region share its reservation lock, so one lock decides what is revoked.
 * Importers that said they can be moved are told when access ends and map no more afterwards.  An
 * importer that pinned keeps what it has: the owner may close, but the memory stays reserved until
 * the pin is gone.
 */
#include <linux/dma-buf.h>
#include <linux/fs.h>
#include <linux/slab.h>

#include "hawk_npu_internal.h"

#define PINNED_BY_MAPPING \
	(!IS_ENABLED(CONFIG_DMABUF_MOVE_NOTIFY) && LINUX_VERSION_CODE < KERNEL_VERSION(6, 19, 0))

struct hnpu_export {
	struct list_head node;		/* region->exports, under region->resv; empty once revoked */
	struct hnpu_region *region;
	struct dma_buf *dmabuf;
	struct inode *inode;		/* the dma-buf's */
	u64 offset;
	u64 nbytes;
	bool revoked;			/* under region->resv; also read without it */
};

/* What one importer holds. */
struct hnpu_import {
	int pins;			/* under region->resv */
};

/* For what begins anew; what was revoked meanwhile is refused by the steps that come after it. */
static int export_hold(struct hnpu_export *export)
{
	return READ_ONCE(export->revoked) ? -ENODEV : hnpu_region_hold(export->region);
}

static int export_attach(struct dma_buf *buf, struct dma_buf_attachment *attachment)
{
	struct hnpu_export *export = buf->priv;
	struct hnpu_region *region = export->region;
	const struct hnpu_provider *ops = region->dev->ops;
	struct hnpu_import *import;
	int ret;

	/* Held while the provider is asked, whose window may be on its way out. */
	ret = export_hold(export);
	if (ret)
		return ret;
	import = hnpu_inject(HNPU_AT_ATTACH) ? NULL : kzalloc(sizeof(*import), GFP_KERNEL);
	if (!import) {
		ret = -ENOMEM;
		goto drop;
	}
	/*
	 * The importer may see from this that the bytes are out of its device's reach; mapping
	 * would fail.
	 */
	if (ops->reachable && !ops->reachable(region, attachment->dev))
		attachment->peer2peer = false;
	attachment->priv = import;
	hnpu_add(HNPU_ATTACHMENTS, 1);
drop:
	hnpu_region_drop(region);
	return ret;
}

static void export_detach(struct dma_buf *buf, struct dma_buf_attachment *attachment)
{
	kfree(attachment->priv);
	hnpu_add(HNPU_ATTACHMENTS, -1);
}

static void count_pins(struct dma_buf_attachment *attachment, int n)
{
	struct hnpu_export *export = attachment->dmabuf->priv;
	struct hnpu_import *import = attachment->priv;

	dma_resv_assert_held(attachment->dmabuf->resv);
	import->pins += n;
	export->region->pins += n;
	hnpu_add(HNPU_PINS, n);
}

static int export_pin(struct dma_buf_attachment *attachment)
{
	struct hnpu_export *export = attachment->dmabuf->priv;
	int ret;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (export->revoked)
		return -ENODEV;
	ret = hnpu_inject(HNPU_AT_PIN) ? -ENOMEM : hnpu_region_hold(export->region);
	if (!ret)
		count_pins(attachment, 1);
	return ret;
}

static void export_unpin(struct dma_buf_attachment *attachment)
{
	struct hnpu_export *export = attachment->dmabuf->priv;

	count_pins(attachment, -1);
	hnpu_region_drop(export->region);
}

static struct sg_table *export_map(struct dma_buf_attachment *attachment, enum dma_data_direction dir)
{
	struct hnpu_export *export = attachment->dmabuf->priv;
	struct hnpu_mapping *m;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (export->revoked)
		return ERR_PTR(-ENODEV);
	if (!(export->region->dev->ops->flags & HAWK_NPU_HAS_PAGES) && !attachment->peer2peer)
		return ERR_PTR(-EOPNOTSUPP);
	m = hnpu_region_map(export->region, export->offset, export->nbytes, attachment->dev, dir);
	if (IS_ERR(m))
		return ERR_CAST(m);
	if (PINNED_BY_MAPPING && attachment->importer_ops)
		count_pins(attachment, -1);
	return &m->sgt;
}

static void export_unmap(struct dma_buf_attachment *attachment, struct sg_table *sgt,
			 enum dma_data_direction dir)
{
	struct hnpu_export *export = attachment->dmabuf->priv;

	if (PINNED_BY_MAPPING && attachment->importer_ops)
		count_pins(attachment, 1);
	hnpu_region_unmap(export->region, container_of(sgt, struct hnpu_mapping, sgt));
}

static int export_begin_cpu_access(struct dma_buf *buf, enum dma_data_direction dir)
{
	struct hnpu_export *export = buf->priv;

	/* For writers, too: what they leave alone shall be what the device wrote there. */
	hnpu_region_sync(export->region, export->offset, export->nbytes, true);
	return 0;
}

static int export_end_cpu_access(struct dma_buf *buf, enum dma_data_direction dir)
{
	struct hnpu_export *export = buf->priv;

	/* Who only read has nothing for the device, which may have gone on writing meanwhile. */
	if (dir != DMA_FROM_DEVICE)
		hnpu_region_sync(export->region, export->offset, export->nbytes, false);
	return 0;
}

static void export_vma_open(struct vm_area_struct *vma)
{
	hnpu_add(HNPU_VMAS, 1);
}

static void export_vma_close(struct vm_area_struct *vma)
{
	hnpu_add(HNPU_VMAS, -1);
}

static vm_fault_t export_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct hnpu_export *export = vma->vm_private_data;
	struct hnpu_region *region = export->region;
	u64 offset = export->offset + ((u64)vmf->pgoff << PAGE_SHIFT);
	vm_fault_t ret = VM_FAULT_SIGBUS;

	/* Revoking marks and unmaps under this lock, so that nothing is mapped behind its back. */
	dma_resv_lock(&region->resv, NULL);
	if (!export->revoked)
		ret = region->dev->ops->fault(region, offset, vmf);
	dma_resv_unlock(&region->resv);
	return ret;
}

static const struct vm_operations_struct export_vm_ops = {
	.open = export_vma_open,
	.close = export_vma_close,
	.fault = export_fault,
};

/*
 * For processes that shall have the bytes and not the device.  The mapping holds the dma-buf, and
 * that the region.
 */
static int export_mmap(struct dma_buf *buf, struct vm_area_struct *vma)
{
	struct hnpu_export *export = buf->priv;
	struct hnpu_region *region = export->region;
	int ret;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	ret = export_hold(export);
	if (ret)
		return ret;
	ret = hnpu_inject(HNPU_AT_MMAP) ? -ENOMEM : region->dev->ops->mmap(region, export->offset, vma);
	hnpu_region_drop(region);
	if (ret)
		return ret;
	hnpu_vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_private_data = export;
	vma->vm_ops = &export_vm_ops;
	export_vma_open(vma);
	return 0;
}

static void export_release(struct dma_buf *buf)
{
	struct hnpu_export *export = buf->priv;
	struct hnpu_region *region = export->region;

	dma_resv_lock(&region->resv, NULL);
	list_del_init(&export->node);
	dma_resv_unlock(&region->resv);
	iput(export->inode);
	kfree(export);
	hnpu_add(HNPU_EXPORTS, -1);
	hnpu_region_put(region);
}

static const struct dma_buf_ops export_ops = {
	.attach = export_attach,
	.detach = export_detach,
	.pin = export_pin,
	.unpin = export_unpin,
	.map_dma_buf = export_map,
	.unmap_dma_buf = export_unmap,
	.begin_cpu_access = export_begin_cpu_access,
	.end_cpu_access = export_end_cpu_access,
	.mmap = export_mmap,
	.release = export_release,
};

/* The caller holds file->lock, so that the region is claimed and does not end meanwhile. */
struct dma_buf *hnpu_export(struct hnpu_region *region, u64 offset, u64 nbytes)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct hnpu_export *export;
	struct dma_buf *buf;

	export = kzalloc(sizeof(*export), GFP_KERNEL_ACCOUNT);
	if (!export)
		return ERR_PTR(-ENOMEM);
	INIT_LIST_HEAD(&export->node);
	export->region = region;
	export->offset = offset;
	export->nbytes = nbytes;
	info.ops = &export_ops;
	info.size = nbytes;
	info.flags = O_RDWR | O_CLOEXEC;
	info.resv = &region->resv;
	info.priv = export;
	buf = hnpu_inject(HNPU_AT_EXPORT) ? ERR_PTR(-ENOMEM) : dma_buf_export(&info);
	if (IS_ERR(buf)) {
		kfree(export);
		return buf;
	}
	kref_get(&region->ref);
	hnpu_add(HNPU_EXPORTS, 1);
	dma_resv_lock(&region->resv, NULL);
	export->dmabuf = buf;
	/* Its last descriptor lets go of it before export_release can take it off the list. */
	export->inode = file_inode(buf->file);
	ihold(export->inode);
	list_add(&export->node, &region->exports);
	dma_resv_unlock(&region->resv);
	return buf;
}

/* Tells who can be moved; those who pinned have no use for it and take it for a fault. */
static void tell(struct dma_buf *buf)
{
	struct dma_buf_attachment *attachment;

	list_for_each_entry(attachment, &buf->attachments, node) {
		struct hnpu_import *import = attachment->priv;

		if (attachment->importer_ops && !import->pins)
			attachment->importer_ops->move_notify(attachment);
	}
}

/*
 * Ends the exports there are.  Without "ending", EBUSY and nothing done if one is pinned; with it,
 * those that are not are ended and the region will never have new ones.
 */
int hnpu_exports_revoke(struct hnpu_region *region, bool ending)
{
	struct hnpu_export *export, *next;

	dma_resv_lock(&region->resv, NULL);
	if (!ending && region->pins) {
		dma_resv_unlock(&region->resv);
		return -EBUSY;
	}
	if (ending)
		WRITE_ONCE(region->ended, true);
	list_for_each_entry_safe(export, next, &region->exports, node) {
		WRITE_ONCE(export->revoked, true);
		list_del_init(&export->node);
		tell(export->dmabuf);
		/*
		 * Pages that a process has mapped are counted, and may stay with it when their
		 * owner closes.
		 */
		if (!ending || !(region->dev->ops->flags & HAWK_NPU_HAS_PAGES))
			unmap_mapping_range(export->inode->i_mapping, 0, 0, 1);
		hnpu_happened(HNPU_REVOCATIONS);
	}
	dma_resv_unlock(&region->resv);
	return 0;
}
