// SPDX-License-Identifier: GPL-2.0
/* Mappings of channels into processes. */
#include <linux/fs.h>
#include <linux/nospec.h>

#include "hawk_npu_internal.h"

#define OFFSET_MASK	((1ULL << HAWK_NPU_MAP_SHIFT) - 1)

u64 hnpu_vma_offset(struct vm_area_struct *vma, unsigned long addr)
{
	return (((u64)vma->vm_pgoff << PAGE_SHIFT) & OFFSET_MASK) + (addr - vma->vm_start);
}

/* A second VMA of the same mapping: a fork, or a part of one that was split. */
static void vma_open(struct vm_area_struct *vma)
{
	struct hnpu_region *region = vma->vm_private_data;

	kref_get(&region->ref);
	hnpu_add(HNPU_VMAS, 1);
}

static void vma_close(struct vm_area_struct *vma)
{
	hnpu_add(HNPU_VMAS, -1);
	hnpu_region_put(vma->vm_private_data);
}

static vm_fault_t vma_fault(struct vm_fault *vmf)
{
	struct hnpu_region *region = vmf->vma->vm_private_data;
	struct hnpu_device *dev = region->dev;
	vm_fault_t ret = VM_FAULT_SIGBUS;

	/*
	 * Removal says so under this lock and unmaps afterwards: what is mapped here before that is
	 * found there.
	 */
	down_read(&dev->live);
	if (!dev->gone && !READ_ONCE(region->ended) && dev->ops->fault)
		ret = dev->ops->fault(region, hnpu_vma_offset(vmf->vma, vmf->address & PAGE_MASK), vmf);
	up_read(&dev->live);
	return ret;
}

const struct vm_operations_struct hnpu_vm_ops = {
	.open = vma_open,
	.close = vma_close,
	.fault = vma_fault,
};

int hnpu_mmap(struct file *filp, struct vm_area_struct *vma)
{
	u64 at = (u64)vma->vm_pgoff << PAGE_SHIFT, channel = at >> HAWK_NPU_MAP_SHIFT;
	u64 offset = at & OFFSET_MASK, nbytes = vma->vm_end - vma->vm_start;
	struct hnpu_file *file = filp->private_data;
	struct hnpu_device *dev = file->dev;
	struct hnpu_region *region;
	int ret;

	/* A private mapping would be a copy that no device sees. */
	if (!(vma->vm_flags & VM_SHARED) || channel >= HAWK_NPU_MAX_CHANNELS)
		return -EINVAL;
	down_read(&dev->live);
	mutex_lock(&file->lock);
	region = file->regions[array_index_nospec(channel, HAWK_NPU_MAX_CHANNELS)];
	if (dev->gone)
		ret = -ENODEV;
	else if (!region)
		ret = -EACCES;
	else if (!hnpu_region_has(region, offset, nbytes))
		ret = -EINVAL;
	else if (hnpu_inject(HNPU_AT_MMAP))
		ret = -ENOMEM;
	else
		ret = dev->ops->mmap(region, offset, vma);
	if (!ret) {
		hnpu_vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
		vma->vm_private_data = region;
		vma->vm_ops = &hnpu_vm_ops;
		vma_open(vma);
	}
	mutex_unlock(&file->lock);
	up_read(&dev->live);
	return ret;
}
