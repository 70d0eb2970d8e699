/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/* /dev/hawk_npu_importer: an importer of dma-bufs for tests; one attachment per open file. */
#ifndef HAWK_NPU_IMPORTER_H
#define HAWK_NPU_IMPORTER_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define IMPORTER_STATIC		0	/* as drivers that know no revocation */
#define IMPORTER_DYNAMIC	1	/* lets go of its mapping when told */
#define IMPORTER_PINNED		2	/* pins */
#define IMPORTER_SLOW		3	/* is told, and lets go only at IMPORTER_UNMAP */

#define IMPORTER_NO_P2P		1	/* flag: cannot do without pages */
#define IMPORTER_DAWDLES	2	/* flag: takes a second to be told */
#define IMPORTER_BOUNCES	4	/* flag: for a device that has copies; EOPNOTSUPP if there can be none */

struct importer_attach {
	__s32 fd;
	__u32 how;
	__u32 flags;
	__u32 device;		/* 0, or a PCI device as domain << 16 | bus << 8 | devfn */
	__u32 peer2peer;	/* out */
	__u32 reserved;
};

struct importer_map {
	__u64 nbytes;		/* out */
	__u32 entries;		/* out */
	__u32 faults;		/* out: DMA_* of dma_copy.h */
};

struct importer_copy {
	__u64 offset;
	__u64 nbytes;
	__u64 user;
	__u32 write;		/* 1: from user to the device's memory */
	__u32 reserved;
};

struct importer_status {
	__u32 attached;
	__u32 mapped;
	__u32 told;
	__u32 reserved;
};

#define IMPORTER_MAGIC	0xB8
#define IMPORTER_ATTACH	_IOWR(IMPORTER_MAGIC, 0, struct importer_attach)
#define IMPORTER_MAP	_IOR(IMPORTER_MAGIC, 1, struct importer_map)
#define IMPORTER_COPY	_IOW(IMPORTER_MAGIC, 2, struct importer_copy)
#define IMPORTER_UNMAP	_IO(IMPORTER_MAGIC, 3)
#define IMPORTER_DETACH	_IO(IMPORTER_MAGIC, 4)
#define IMPORTER_STATUS	_IOR(IMPORTER_MAGIC, 5, struct importer_status)

#endif
