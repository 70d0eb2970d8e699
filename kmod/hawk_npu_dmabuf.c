// SPDX-License-Identifier: GPL-2.0
/*
 * Windows of other drivers, adopted by dma-buf, for RDMA stacks that register memory only through
 * peer-memory clients.  Each NIC gets an attachment of its own when a registration needs it.  The
 * mapping that a channel has here is only the address that is registered: the bytes are behind the
 * other driver's dma-buf.
 */
#include <linux/dma-buf.h>
#include <linux/slab.h>

#include "hawk_npu_internal.h"

static bool adopt;
module_param(adopt, bool, 0444);
MODULE_PARM_DESC(adopt, "make a device that adopts dma-bufs of other drivers (N)");

static struct hnpu_device *device;

static int dmabuf_claim(struct hnpu_region *region, struct dma_buf *source)
{
	/* A dma-buf's size need not be of whole pages; only whole ones can be mapped. */
	u64 nbytes = ALIGN_DOWN(source->size, PAGE_SIZE);

	if (!nbytes || nbytes > 1ULL << HAWK_NPU_MAP_SHIFT)
		return -EINVAL;
	if (hnpu_inject(HNPU_AT_ADOPT))
		return -ENOMEM;
	get_dma_buf(source);
	region->priv = source;
	region->nbytes = nbytes;
	hnpu_add(HNPU_ADOPTED, 1);
	return 0;
}

static void dmabuf_give_back(struct hnpu_region *region)
{
	dma_buf_put(region->priv);
	hnpu_add(HNPU_ADOPTED, -1);
}

static int dmabuf_mmap(struct hnpu_region *region, u64 offset, struct vm_area_struct *vma)
{
	/* No fault of it is ever answered. */
	hnpu_vm_flags_set(vma, VM_IO | VM_PFNMAP);
	return 0;
}

static void source_moves(struct dma_buf_attachment *attachment)
{
	/*
	 * It is pinned from map to unmap, and before and after that there is nothing to let go of.
	 */
}

static const struct dma_buf_attach_ops importer_ops = {
	.allow_peer2peer = true,
	.move_notify = source_moves,
};

/*
 * The part of a scatter list's DMA addresses that holds [offset, offset + nbytes), in a table of
 * its own.
 */
static int cut(struct sg_table *to, struct sg_table *from, u64 offset, u64 nbytes)
{
	struct scatterlist *sg, *out = NULL;
	u64 start = 0, end = offset + nbytes, covered = 0;
	unsigned int n = 0;
	int i, ret;

	for_each_sgtable_dma_sg(from, sg, i) {
		if (start < end && start + sg_dma_len(sg) > offset)
			n++;
		start += sg_dma_len(sg);
	}
	if (!n)
		return -EINVAL;
	ret = hnpu_inject(HNPU_AT_MAP_TABLE) ? -ENOMEM : sg_alloc_table(to, n, GFP_KERNEL);
	if (ret)
		return ret;
	start = 0;
	for_each_sgtable_dma_sg(from, sg, i) {
		u64 first = max(start, offset), last = min(start + sg_dma_len(sg), end);

		if (first < last) {
			out = out ? sg_next(out) : to->sgl;
			sg_set_page(out, NULL, last - first, 0);
			sg_dma_address(out) = sg_dma_address(sg) + (first - start);
			sg_dma_len(out) = last - first;
			covered += last - first;
		}
		start += sg_dma_len(sg);
	}
	if (covered == nbytes)
		return 0;
	sg_free_table(to);
	return -EINVAL;
}

static int dmabuf_map(struct hnpu_region *region, struct hnpu_mapping *m)
{
	struct dma_buf *source = region->priv;
	struct dma_buf_attachment *attachment;
	int ret;

	attachment = hnpu_inject(HNPU_AT_ADOPT_ATTACH) ? ERR_PTR(-ENOMEM) :
		     dma_buf_dynamic_attach(source, m->dev, &importer_ops, m);
	if (IS_ERR(attachment))
		return PTR_ERR(attachment);
	dma_resv_lock(source->resv, NULL);
	ret = dma_buf_pin(attachment);
	if (ret)
		goto unlock;
	m->source = dma_buf_map_attachment(attachment, m->dir);
	ret = PTR_ERR_OR_ZERO(m->source);
	if (ret)
		goto unpin;
	ret = cut(&m->sgt, m->source, m->offset, m->nbytes);
	if (ret)
		goto unmap;
	dma_resv_unlock(source->resv);
	m->priv = attachment;
	return 0;
unmap:
	dma_buf_unmap_attachment(attachment, m->source, m->dir);
unpin:
	dma_buf_unpin(attachment);
unlock:
	dma_resv_unlock(source->resv);
	dma_buf_detach(source, attachment);
	return ret;
}

static void dmabuf_unmap(struct hnpu_region *region, struct hnpu_mapping *m)
{
	struct dma_buf *source = region->priv;
	struct dma_buf_attachment *attachment = m->priv;

	sg_free_table(&m->sgt);
	dma_resv_lock(source->resv, NULL);
	dma_buf_unmap_attachment(attachment, m->source, m->dir);
	dma_buf_unpin(attachment);
	dma_resv_unlock(source->resv);
	dma_buf_detach(source, attachment);
}

static const struct hnpu_provider dmabuf_ops = {
	.kind = HAWK_NPU_DMABUF,
	.claim = dmabuf_claim,
	.give_back = dmabuf_give_back,
	.mmap = dmabuf_mmap,
	.map = dmabuf_map,
	.unmap = dmabuf_unmap,
};

int hnpu_dmabuf_init(void)
{
	if (!adopt)
		return 0;
	device = hnpu_device_add(&dmabuf_ops, NULL, NULL, HAWK_NPU_MAX_CHANNELS, 0);
	return PTR_ERR_OR_ZERO(device);
}

void hnpu_dmabuf_exit(void)
{
	if (adopt)
		hnpu_device_remove(device);
}
