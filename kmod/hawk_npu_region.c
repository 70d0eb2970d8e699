// SPDX-License-Identifier: GPL-2.0
/* Regions: one channel claimed by one open file, and who else can reach its bytes. */
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "hawk_npu_internal.h"

#define FNV_OFFSET	0xcbf29ce484222325ULL
#define FNV_PRIME	0x100000001b3ULL

static void region_free(struct kref *ref)
{
	struct hnpu_region *region = container_of(ref, struct hnpu_region, ref);

	WARN_ON(!list_empty(&region->exports) || !list_empty(&region->peers) || region->pins ||
		!list_empty(&region->mappings));
	dma_resv_fini(&region->resv);
	hnpu_device_put(region->dev);
	kfree(region);
}

void hnpu_region_put(struct hnpu_region *region)
{
	kref_put(&region->ref, region_free);
}

/*
 * Always from the queue: whoever was last may be an importer inside its own locks, and a provider
 * may have to take the same kind of lock to let go of what it adopted.
 */
static void region_give_back(struct work_struct *work)
{
	struct hnpu_region *region = container_of(work, struct hnpu_region, give_back);
	struct hnpu_device *dev = region->dev;

	dev->ops->give_back(region);
	hnpu_add(HNPU_REGIONS, -1);
	if (atomic_dec_and_test(&dev->claimed))
		wake_up_all(&dev->idle);
	hnpu_region_put(region);
}

/*
 * A region with one user and two holders: the owner's slot, and the memory as long as it has users.
 */
struct hnpu_region *hnpu_region_create(struct hnpu_device *dev, u32 channel, struct dma_buf *source)
{
	struct hnpu_region *region;
	int ret;

	if (hnpu_inject(HNPU_AT_REGION))
		return ERR_PTR(-ENOMEM);
	region = kzalloc(sizeof(*region), GFP_KERNEL_ACCOUNT);
	if (!region)
		return ERR_PTR(-ENOMEM);
	kref_init(&region->ref);
	refcount_set(&region->users, 1);
	region->dev = dev;
	region->channel = channel;
	region->nbytes = dev->channel_bytes;
	dma_resv_init(&region->resv);
	INIT_LIST_HEAD(&region->exports);
	INIT_LIST_HEAD(&region->peers);
	mutex_init(&region->mappings_lock);
	INIT_LIST_HEAD(&region->mappings);
	INIT_WORK(&region->give_back, region_give_back);
	kref_get(&dev->ref);
	ret = hnpu_inject(HNPU_AT_CLAIM) ? -ENOMEM : dev->ops->claim(region, source);
	if (ret) {
		hnpu_region_put(region);
		return ERR_PTR(ret);
	}
	kref_get(&region->ref);
	atomic_inc(&dev->claimed);
	hnpu_add(HNPU_REGIONS, 1);
	return region;
}

/* For one more user of the memory; ENODEV once the owner is gone. */
int hnpu_region_hold(struct hnpu_region *region)
{
	if (READ_ONCE(region->ended) || !refcount_inc_not_zero(&region->users))
		return -ENODEV;
	kref_get(&region->ref);
	return 0;
}

static void region_unuse(struct hnpu_region *region)
{
	if (refcount_dec_and_test(&region->users))
		queue_work(hnpu_wq, &region->give_back);
}

void hnpu_region_drop(struct hnpu_region *region)
{
	region_unuse(region);
	hnpu_region_put(region);
}

/*
 * The owner is gone: closed, killed, or its device removed.  Everybody who can be told to let go is
 * told; for the others the memory stays reserved.
 */
void hnpu_region_end(struct hnpu_region *region)
{
	hnpu_exports_revoke(region, true);
	hnpu_peer_invalidate(region);
	region_unuse(region);
	/* With nobody left the memory is free when close returns. */
	flush_work(&region->give_back);
	hnpu_region_put(region);
}

/* The owner is one user of the memory, the caller another; whoever else there is has not let go. */
int hnpu_region_revoke(struct hnpu_region *region)
{
	int ret = hnpu_exports_revoke(region, false);

	if (ret)
		return ret;
	hnpu_peer_invalidate(region);
	return refcount_read(&region->users) > 2 ? -EBUSY : 0;
}

int hnpu_region_reset(struct hnpu_region *region)
{
	const struct hnpu_provider *ops = region->dev->ops;
	int ret;

	if (!ops->zero)
		return -EOPNOTSUPP;
	ret = hnpu_region_revoke(region);
	if (ret)
		return ret;
	if (ops->busy && ops->busy(region))
		return -EBUSY;
	return ops->zero(region);
}

bool hnpu_region_has(struct hnpu_region *region, u64 offset, u64 nbytes)
{
	return nbytes && offset <= region->nbytes && nbytes <= region->nbytes - offset;
}

int hnpu_region_flush(struct hnpu_region *region, u64 offset, u64 nbytes)
{
	const struct hnpu_provider *ops = region->dev->ops;

	if (!hnpu_region_has(region, offset, nbytes))
		return -EINVAL;
	if (!ops->flush)
		return -EOPNOTSUPP;
	hnpu_region_sync(region, offset, nbytes, true);
	return ops->flush(region, offset, nbytes);
}

int hnpu_region_checksum(struct hnpu_region *region, u64 offset, u64 nbytes, u64 *value)
{
	const struct hnpu_provider *ops = region->dev->ops;
	u64 hash = FNV_OFFSET;
	size_t i, n;
	int ret = 0;
	u8 *bytes;

	if (nbytes > HAWK_NPU_CHECKSUM_MAX || !hnpu_region_has(region, offset, nbytes))
		return -EINVAL;
	if (!ops->read)
		return -EOPNOTSUPP;
	bytes = kmalloc(PAGE_SIZE, GFP_KERNEL);
	if (!bytes)
		return -ENOMEM;
	hnpu_region_sync(region, offset, nbytes, true);
	for (; nbytes; offset += n, nbytes -= n) {
		if (fatal_signal_pending(current)) {
			ret = -EINTR;
			break;
		}
		n = min_t(u64, nbytes, PAGE_SIZE - offset_in_page(offset));
		ret = ops->read(region, offset, bytes, n);
		if (ret)
			break;
		for (i = 0; i < n; i++)
			hash = (hash ^ bytes[i]) * FNV_PRIME;
		cond_resched();
	}
	kfree(bytes);
	*value = hash;
	return ret;
}

/* DMA addresses of a range for one device; the memory stays until hnpu_region_unmap. */
struct hnpu_mapping *hnpu_region_map(struct hnpu_region *region, u64 offset, u64 nbytes,
				     struct device *dev, enum dma_data_direction dir)
{
	const struct hnpu_provider *ops = region->dev->ops;
	struct hnpu_mapping *m;
	int ret;

	ret = hnpu_region_hold(region);
	if (ret)
		return ERR_PTR(ret);
	ret = -ENOMEM;
	m = hnpu_inject(HNPU_AT_MAP) ? NULL : kzalloc(sizeof(*m), GFP_KERNEL);
	if (!m)
		goto drop;
	m->dev = dev;
	m->dir = dir;
	m->offset = offset;
	m->nbytes = nbytes;
	ret = ops->map(region, m);
	if (ret)
		goto free;
	mutex_lock(&region->mappings_lock);
	list_add(&m->node, &region->mappings);
	mutex_unlock(&region->mappings_lock);
	hnpu_add(HNPU_MAPPINGS, 1);
	return m;
free:
	kfree(m);
drop:
	hnpu_region_drop(region);
	return ERR_PTR(ret);
}

void hnpu_region_unmap(struct hnpu_region *region, struct hnpu_mapping *m)
{
	mutex_lock(&region->mappings_lock);
	list_del(&m->node);
	mutex_unlock(&region->mappings_lock);
	region->dev->ops->unmap(region, m);
	kfree(m);
	hnpu_add(HNPU_MAPPINGS, -1);
	hnpu_region_drop(region);
}

/*
 * Before processors look at a range, or once they have written to it: for every device that has any
 * of it mapped.  Nothing happens where DMA is coherent and goes to the pages themselves.
 */
void hnpu_region_sync(struct hnpu_region *region, u64 offset, u64 nbytes, bool for_cpu)
{
	const struct hnpu_provider *ops = region->dev->ops;
	struct hnpu_mapping *m;

	if (!ops->sync)
		return;
	mutex_lock(&region->mappings_lock);
	list_for_each_entry(m, &region->mappings, node)
		if (m->offset < offset + nbytes && offset < m->offset + m->nbytes)
			ops->sync(m, for_cpu);
	mutex_unlock(&region->mappings_lock);
}
