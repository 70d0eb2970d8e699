/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/* /dev/hawk_npu_peer_core: the core's side of the peer-memory interface, for tests. */
#ifndef HAWK_NPU_PEER_CORE_H
#define HAWK_NPU_PEER_CORE_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* peer_core_register.failed: the step that refused. */
#define PEER_CORE_ACQUIRE	1
#define PEER_CORE_GET_PAGES	2
#define PEER_CORE_DMA_MAP	3

/* peer_core_deregister.order: what versions of the core do. */
#define PEER_CORE_UNMAP_PUT	0	/* dma_unmap, put_pages, release */
#define PEER_CORE_PUT_UNMAP	1	/* put_pages, dma_unmap, release */
#define PEER_CORE_TWICE		2	/* the first, also when it was invalidated before */
#define PEER_CORE_RELEASE_ONLY	3

struct peer_core_register {
	__u64 addr;
	__u64 nbytes;
	__u32 device;		/* 0, or a PCI device as domain << 16 | bus << 8 | devfn */
	__u32 id;		/* out */
	__u32 failed;		/* out: 0, or the step; then the call's error is the step's */
	__u32 entries;		/* out */
	__u32 faults;		/* out: DMA_* of dma_copy.h */
	__u32 page_bytes;	/* out */
};

struct peer_core_deregister {
	__u32 id;
	__u32 order;
};

struct peer_core_copy {
	__u32 id;
	__u32 write;
	__u64 offset;		/* counts from addr */
	__u64 nbytes;
	__u64 user;
};

struct peer_core_status {
	__u32 id;
	__u32 invalidated;	/* out */
	__u32 clients;		/* out */
	__u32 live;		/* out: registrations of all files */
};

#define PEER_CORE_MAGIC		0xB9
#define PEER_CORE_REGISTER	_IOWR(PEER_CORE_MAGIC, 0, struct peer_core_register)
#define PEER_CORE_DEREGISTER	_IOW(PEER_CORE_MAGIC, 1, struct peer_core_deregister)
#define PEER_CORE_COPY		_IOW(PEER_CORE_MAGIC, 2, struct peer_core_copy)
#define PEER_CORE_STATUS	_IOWR(PEER_CORE_MAGIC, 3, struct peer_core_status)

#endif
