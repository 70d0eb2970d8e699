/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of hawk_npu know of each other.
 *
 * A device has channels; a region is one channel claimed by one open file.  The region outlives its
 * owner for as long as somebody else can reach its bytes, so two things are counted apart:
 *
 *   region->ref    the structure: the owner's slot, each mapping into a process, each dma-buf, each peer
 *   region->users  the memory: the owner, calls under way, each DMA mapping, each pin.  At 0 the provider gets it back.
 *
 * Locks, outermost first: device->files_lock, mmap_lock, device->live, file->lock, region->resv,
 * hnpu_peer_lock, region->mappings_lock.  Nothing is copied from or to user space under any of them.
 * Importers are told under region->resv, as dma-buf has it; the RDMA core under none but files_lock.
 */
#ifndef HAWK_NPU_INTERNAL_H
#define HAWK_NPU_INTERNAL_H

#include <linux/device.h>
#include <linux/dma-direction.h>
#include <linux/dma-resv.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/rwsem.h>
#include <linux/scatterlist.h>
#include <linux/types.h>
#include <linux/version.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "hawk_npu.h"

struct dma_buf;
struct hnpu_region;

/* One range of a region, mapped for one device. */
struct hnpu_mapping {
	struct list_head node;	/* region->mappings, under region->mappings_lock */
	struct sg_table sgt;
	struct device *dev;
	enum dma_data_direction dir;
	u64 offset;
	u64 nbytes;
	void *priv;		/* the provider's */
	struct sg_table *source; /* the provider's */
};

/* Where the bytes are.  What is NULL cannot be done, but for fault, reachable, busy and sync. */
struct hnpu_provider {
	u32 kind;
	u32 flags;
	/* Makes the channel the region's own, its bytes zero. */
	int (*claim)(struct hnpu_region *region, struct dma_buf *source);
	/* Nobody can reach the bytes any more. */
	void (*give_back)(struct hnpu_region *region);
	/* Whether someone holds pages whom this module did not map them for. */
	bool (*busy)(struct hnpu_region *region);
	/*
	 * Prepares a mapping of [offset, offset + size of vma), whose bounds were checked; fault
	 * fills it.
	 */
	int (*mmap)(struct hnpu_region *region, u64 offset, struct vm_area_struct *vma);
	vm_fault_t (*fault)(struct hnpu_region *region, u64 offset, struct vm_fault *vmf);
	/* Whether a device can reach the bytes at all, as the buses lie. */
	bool (*reachable)(struct hnpu_region *region, struct device *dev);
	int (*map)(struct hnpu_region *region, struct hnpu_mapping *m);
	void (*unmap)(struct hnpu_region *region, struct hnpu_mapping *m);
	/* Lets processors see what the device wrote, or the device what they wrote. */
	void (*sync)(struct hnpu_mapping *m, bool for_cpu);
	int (*read)(struct hnpu_region *region, u64 offset, void *to, size_t n);
	int (*zero)(struct hnpu_region *region);
	int (*flush)(struct hnpu_region *region, u64 offset, u64 n);
};

struct hnpu_device {
	struct kref ref;
	struct miscdevice misc;
	char name[24];
	int id;
	const struct hnpu_provider *ops;
	void *priv;
	u32 channels;
	u64 channel_bytes;
	struct rw_semaphore live;	/* written once, by removal */
	bool gone;			/* under live */
	struct mutex files_lock;
	struct list_head files;		/* under files_lock */
	atomic_t claimed;		/* regions whose memory is not given back */
	wait_queue_head_t idle;
};

struct hnpu_region {
	struct kref ref;
	refcount_t users;
	struct hnpu_device *dev;
	u32 channel;
	u64 nbytes;
	void *priv;			/* the provider's */
	struct dma_resv resv;		/* of all exports of this region */
	bool ended;			/* under resv; also read without it */
	int pins;			/* under resv: of exports, by those who cannot be told */
	struct list_head exports;	/* under resv */
	struct list_head peers;		/* under hnpu_peer_lock */
	struct mutex mappings_lock;
	struct list_head mappings;	/* under mappings_lock */
	struct work_struct give_back;
};

struct hnpu_file {
	struct list_head node;
	struct hnpu_device *dev;
	struct address_space *mapping;
	bool writable;
	struct mutex lock;
	struct hnpu_region *regions[HAWK_NPU_MAX_CHANNELS];	/* under lock */
};

/* main */
struct hnpu_device *hnpu_device_add(const struct hnpu_provider *ops, void *priv, struct device *parent,
				    u32 channels, u64 channel_bytes);
void hnpu_device_remove(struct hnpu_device *dev);
void hnpu_device_put(struct hnpu_device *dev);
extern struct workqueue_struct *hnpu_wq;

/* file */
extern const struct file_operations hnpu_fops;
void hnpu_file_end(struct hnpu_file *file);

/* mmap */
extern const struct vm_operations_struct hnpu_vm_ops;
int hnpu_mmap(struct file *filp, struct vm_area_struct *vma);
u64 hnpu_vma_offset(struct vm_area_struct *vma, unsigned long addr);

/* region */
struct hnpu_region *hnpu_region_create(struct hnpu_device *dev, u32 channel, struct dma_buf *source);
int hnpu_region_hold(struct hnpu_region *region);
void hnpu_region_drop(struct hnpu_region *region);
void hnpu_region_put(struct hnpu_region *region);
void hnpu_region_end(struct hnpu_region *region);
int hnpu_region_revoke(struct hnpu_region *region);
int hnpu_region_reset(struct hnpu_region *region);
bool hnpu_region_has(struct hnpu_region *region, u64 offset, u64 nbytes);
int hnpu_region_flush(struct hnpu_region *region, u64 offset, u64 nbytes);
int hnpu_region_checksum(struct hnpu_region *region, u64 offset, u64 nbytes, u64 *value);
struct hnpu_mapping *hnpu_region_map(struct hnpu_region *region, u64 offset, u64 nbytes,
				     struct device *dev, enum dma_data_direction dir);
void hnpu_region_unmap(struct hnpu_region *region, struct hnpu_mapping *m);
void hnpu_region_sync(struct hnpu_region *region, u64 offset, u64 nbytes, bool for_cpu);

/* export */
struct dma_buf *hnpu_export(struct hnpu_region *region, u64 offset, u64 nbytes);
int hnpu_exports_revoke(struct hnpu_region *region, bool ending);

/* providers */
int hnpu_emulated_init(void);
void hnpu_emulated_exit(void);
int hnpu_bar_init(void);
void hnpu_bar_exit(void);
int hnpu_dmabuf_init(void);
void hnpu_dmabuf_exit(void);

/* peer */
#ifdef HNPU_PEER
int hnpu_peer_init(void);
void hnpu_peer_exit(void);
void hnpu_peer_invalidate(struct hnpu_region *region);
u32 hnpu_peer_flags(void);
#else
static inline int hnpu_peer_init(void)
{
	pr_info("peer-memory client: off (built without OFED=)\n");
	return 0;
}

static inline void hnpu_peer_exit(void) { }
static inline void hnpu_peer_invalidate(struct hnpu_region *region) { }
static inline u32 hnpu_peer_flags(void) { return 0; }
#endif

/* stats: what there is now, and what has happened */
enum hnpu_count {
	HNPU_OPENS,
	HNPU_REGIONS,
	HNPU_PAGES,
	HNPU_PAGES_KEPT,
	HNPU_VMAS,
	HNPU_EXPORTS,
	HNPU_ATTACHMENTS,
	HNPU_PINS,
	HNPU_MAPPINGS,
	HNPU_PEERS,
	HNPU_PEER_PINS,
	HNPU_ADOPTED,
	HNPU_COUNTS,
};

enum hnpu_event {
	HNPU_REVOCATIONS,
	HNPU_INVALIDATIONS,
	HNPU_INJECTED,
	HNPU_EVENTS,
};

void hnpu_add(enum hnpu_count what, long n);
void hnpu_happened(enum hnpu_event what);
void hnpu_stats_init(void);
void hnpu_stats_exit(void);

/* fault: steps that the parameter "inject" can make fail */
enum hnpu_step {
	HNPU_AT_OPEN,
	HNPU_AT_REGION,
	HNPU_AT_CLAIM,
	HNPU_AT_PAGE,
	HNPU_AT_MMAP,
	HNPU_AT_EXPORT,
	HNPU_AT_EXPORT_FD,
	HNPU_AT_ATTACH,
	HNPU_AT_PIN,
	HNPU_AT_MAP,
	HNPU_AT_MAP_TABLE,
	HNPU_AT_MAP_DMA,
	HNPU_AT_ADOPT,
	HNPU_AT_ADOPT_ATTACH,
	HNPU_AT_PEER_ACQUIRE,
	HNPU_AT_PEER_PIN,
	HNPU_AT_PEER_MAP,
	HNPU_AT_PROBE,
	HNPU_STEPS,
};

bool hnpu_inject(enum hnpu_step step);

static inline void hnpu_vm_flags_set(struct vm_area_struct *vma, unsigned long flags)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_set(vma, flags);
#else
	vma->vm_flags |= flags;
#endif
}

#endif
