// SPDX-License-Identifier: GPL-2.0
/*
 * The peer-memory client, for RDMA stacks (OFED) that have the interface.
 *
 * The core asks every client for addresses that it cannot pin itself.  Ours are mappings of this
 * module's devices. A registration belongs to the region, not to the mapping: unmapping leaves it
 * alone, and when the region goes away the core is told and undoes it from inside that call.
 *
 * Versions differ in the order in which a registration is undone and in whether they undo one again
 * that was invalidated, so every step can be the first, the last or a repetition.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/overflow.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <rdma/peer_mem.h>

#include "hawk_npu_internal.h"

#ifndef PEER_MEM_U64_CORE_CONTEXT
#error "this RDMA stack's peer-memory interface is too old: it has no core contexts of 64 bits"
#endif

static bool peer_invalidate = true;
module_param(peer_invalidate, bool, 0444);
MODULE_PARM_DESC(peer_invalidate,
		 "ask for registrations that can be ended when a channel goes; N serves the others too, whose channels stay reserved (Y)");

struct hnpu_peer {
	struct kref ref;
	struct list_head node;		/* region->peers, under hnpu_peer_lock; while pinned */
	struct hnpu_region *region;
	u64 offset;			/* whole pages around what was asked for */
	u64 nbytes;
	bool writable;
	u64 core_context;	/* set before node is listed */
	bool told;			/* under hnpu_peer_lock */
	struct mutex lock;		/* of what is below */
	bool pinned;
	struct hnpu_mapping *m;
};

static DEFINE_MUTEX(hnpu_peer_lock);
static invalidate_peer_memory invalidate;
static void *registration;

static void peer_free(struct kref *ref)
{
	struct hnpu_peer *peer = container_of(ref, struct hnpu_peer, ref);

	hnpu_region_put(peer->region);
	kfree(peer);
}

/*
 * Whether a mapping of ours holds all of [addr, addr + size): its region, referenced, the place in
 * it, and whether it may be written through.
 */
static struct hnpu_region *find(unsigned long addr, unsigned long end, u64 *offset, bool *writable)
{
	struct hnpu_region *region = NULL;
	struct mm_struct *mm = current->mm;
	struct vm_area_struct *vma;

	if (!mm)
		return NULL;
	mmap_read_lock(mm);
	vma = vma_lookup(mm, addr);
	if (vma && vma->vm_ops == &hnpu_vm_ops && end <= vma->vm_end) {
		region = vma->vm_private_data;
		kref_get(&region->ref);
		*offset = hnpu_vma_offset(vma, addr);
		*writable = vma->vm_flags & VM_WRITE;
	}
	mmap_read_unlock(mm);
	return region;
}

static int peer_acquire(unsigned long addr, size_t size, void *private_data, char *name,
			void **client_context)
{
	unsigned long start = addr & PAGE_MASK, end;
	struct hnpu_region *region;
	struct hnpu_peer *peer;
	bool writable;
	u64 offset;

	if (!size || check_add_overflow(addr, size, &end) || end > ULONG_MAX - PAGE_SIZE)
		return 0;
	end = PAGE_ALIGN(end);
	region = find(start, end, &offset, &writable);
	if (!region)
		return 0;
	peer = hnpu_inject(HNPU_AT_PEER_ACQUIRE) ? NULL : kzalloc(sizeof(*peer), GFP_KERNEL);
	if (!peer) {
		hnpu_region_put(region);
		return 0;
	}
	kref_init(&peer->ref);
	INIT_LIST_HEAD(&peer->node);
	mutex_init(&peer->lock);
	peer->region = region;
	peer->offset = offset;
	peer->nbytes = end - start;
	peer->writable = writable;
	*client_context = peer;
	/*
	 * From here to release the core calls into this module, so that unloading it is refused.
	 * (Unregistering waits until the core has returned from the last release: it may drop the
	 * reference itself.)
	 */
	__module_get(THIS_MODULE);
	hnpu_add(HNPU_PEERS, 1);
	return 1;
}

static void unlist(struct hnpu_peer *peer)
{
	mutex_lock(&hnpu_peer_lock);
	list_del_init(&peer->node);
	mutex_unlock(&hnpu_peer_lock);
}

static int peer_get_pages(unsigned long addr, size_t size, int write, int force, struct sg_table *sg_head,
			  void *client_context, u64 core_context)
{
	struct hnpu_peer *peer = client_context;
	int ret = -EINVAL;

	mutex_lock(&peer->lock);
	if (peer->pinned)
		goto unlock;
	/* As for memory that the core pins itself: who may not write there cannot have a NIC do it. */
	ret = -EFAULT;
	if (write && !peer->writable)
		goto unlock;
	ret = -ENOMEM;
	if (hnpu_inject(HNPU_AT_PEER_PIN))
		goto unlock;
	/* Listed first: an end that hold does not see yet will see the list. */
	peer->core_context = core_context;
	mutex_lock(&hnpu_peer_lock);
	peer->told = false;
	list_add(&peer->node, &peer->region->peers);
	mutex_unlock(&hnpu_peer_lock);
	ret = hnpu_region_hold(peer->region);
	if (ret) {
		unlist(peer);
		goto unlock;
	}
	peer->pinned = true;
	hnpu_add(HNPU_PEER_PINS, 1);
unlock:
	mutex_unlock(&peer->lock);
	return ret;
}

static void unmap(struct hnpu_peer *peer)
{
	if (!peer->m)
		return;
	hnpu_region_unmap(peer->region, peer->m);
	peer->m = NULL;
}

static void unpin(struct hnpu_peer *peer)
{
	if (!peer->pinned)
		return;
	peer->pinned = false;
	unlist(peer);
	hnpu_add(HNPU_PEER_PINS, -1);
	hnpu_region_drop(peer->region);
}

static int peer_dma_map(struct sg_table *sg_head, void *client_context, struct device *dma_device,
			int dmasync, int *nmap)
{
	struct hnpu_peer *peer = client_context;
	struct hnpu_region *region = peer->region;
	const struct hnpu_provider *ops = region->dev->ops;
	struct hnpu_mapping *m;
	int ret = -EINVAL;

	mutex_lock(&peer->lock);
	if (!peer->pinned || peer->m)
		goto unlock;
	ret = -EREMOTEIO;
	if (ops->reachable && !ops->reachable(region, dma_device))
		goto unlock;
	ret = -ENOMEM;
	if (hnpu_inject(HNPU_AT_PEER_MAP))
		goto unlock;
	m = hnpu_region_map(region, peer->offset, peer->nbytes, dma_device, DMA_BIDIRECTIONAL);
	ret = PTR_ERR_OR_ZERO(m);
	if (ret)
		goto unlock;
	peer->m = m;
	/* The core reads the table; it stays ours, and goes with the mapping. */
	*sg_head = m->sgt;
	*nmap = m->sgt.nents;
unlock:
	mutex_unlock(&peer->lock);
	return ret;
}

static int peer_dma_unmap(struct sg_table *sg_head, void *client_context, struct device *dma_device)
{
	struct hnpu_peer *peer = client_context;

	mutex_lock(&peer->lock);
	unmap(peer);
	mutex_unlock(&peer->lock);
	return 0;
}

static void peer_put_pages(struct sg_table *sg_head, void *client_context)
{
	struct hnpu_peer *peer = client_context;

	/* A mapping that is still there has a hold of its own on the memory. */
	mutex_lock(&peer->lock);
	unpin(peer);
	mutex_unlock(&peer->lock);
}

static unsigned long peer_get_page_size(void *client_context)
{
	return PAGE_SIZE;
}

static void peer_release(void *client_context)
{
	struct hnpu_peer *peer = client_context;

	mutex_lock(&peer->lock);
	unmap(peer);
	unpin(peer);
	mutex_unlock(&peer->lock);
	kref_put(&peer->ref, peer_free);
	hnpu_add(HNPU_PEERS, -1);
	module_put(THIS_MODULE);
}

static struct peer_memory_client client = {
	.name = KBUILD_MODNAME,
	.version = "1.0",
	.acquire = peer_acquire,
	.get_pages = peer_get_pages,
	.dma_map = peer_dma_map,
	.dma_unmap = peer_dma_unmap,
	.put_pages = peer_put_pages,
	.get_page_size = peer_get_page_size,
	.release = peer_release,
};

static struct hnpu_peer *next_untold(struct hnpu_region *region)
{
	struct hnpu_peer *peer;

	mutex_lock(&hnpu_peer_lock);
	list_for_each_entry(peer, &region->peers, node) {
		if (!peer->told) {
			peer->told = true;
			kref_get(&peer->ref);
			mutex_unlock(&hnpu_peer_lock);
			return peer;
		}
	}
	mutex_unlock(&hnpu_peer_lock);
	return NULL;
}

/* The core calls dma_unmap and put_pages from inside; no lock of theirs may be held here. */
void hnpu_peer_invalidate(struct hnpu_region *region)
{
	struct hnpu_peer *peer;

	if (!invalidate)
		return;
	while ((peer = next_untold(region))) {
		hnpu_happened(HNPU_INVALIDATIONS);
		invalidate(registration, peer->core_context);
		kref_put(&peer->ref, peer_free);
	}
}

u32 hnpu_peer_flags(void)
{
	return HAWK_NPU_PEER_CLIENT | (invalidate ? HAWK_NPU_PEER_REVOKES : 0);
}

int hnpu_peer_init(void)
{
	registration = ib_register_peer_memory_client(&client, peer_invalidate ? &invalidate : NULL);
	if (IS_ERR_OR_NULL(registration)) {
		pr_err("the RDMA core refused the peer-memory client\n");
		return registration ? PTR_ERR(registration) : -EINVAL;
	}
	pr_info("peer-memory client: on, %s\n",
		invalidate ? "registrations end with their channel" :
			     "channels stay reserved while they are registered");
	return 0;
}

void hnpu_peer_exit(void)
{
	ib_unregister_peer_memory_client(registration);
}
