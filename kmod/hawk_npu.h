/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * What user space says to /dev/hawk_npuN.
 *
 * A device has memory channels.  An open file claims channels; what it claimed is its own, whoever
 * holds the descriptor, until the last descriptor and mapping of that open is gone.  All offsets
 * and lengths count bytes within one channel.  Fields named reserved, and flags without a bit
 * described here, must be zero.
 *
 * Calls answer ENODEV once the device is gone, EACCES for a channel that this open has not claimed,
 * EINVAL for figures out of bounds and EOPNOTSUPP for what the device's provider cannot do.
 */
#ifndef _UAPI_HAWK_NPU_H
#define _UAPI_HAWK_NPU_H

#include <linux/ioctl.h>
#include <linux/types.h>

/*
 * Raised when something below changes its meaning; what is only added shows in a flag of
 * hawk_npu_info.
 */
#define HAWK_NPU_ABI_VERSION	1

#define HAWK_NPU_MAX_CHANNELS	64

/*
 * mmap: byte b of channel c is at file offset (c << HAWK_NPU_MAP_SHIFT) + b; shared mappings only.
 */
#define HAWK_NPU_MAP_SHIFT	40

/* Most bytes that one HAWK_NPU_CHECKSUM sums up. */
#define HAWK_NPU_CHECKSUM_MAX	0x4000000

/* hawk_npu_info.provider: where the bytes are. */
#define HAWK_NPU_EMULATED	1	/* pages of this machine, new and zero with every claim */
#define HAWK_NPU_BAR		2	/* a PCI device's window, divided into channels */
#define HAWK_NPU_DMABUF		3	/* windows of other drivers, adopted one by one */

/* hawk_npu_info.flags */
#define HAWK_NPU_CAN_EXPORT	0x1	/* HAWK_NPU_EXPORT gives dma-bufs */
#define HAWK_NPU_HAS_PAGES	0x2	/* a plain memory registration of a mapping works */
#define HAWK_NPU_PEER_CLIENT	0x4	/* the peer-memory client is there */
#define HAWK_NPU_PEER_REVOKES	0x8	/* and its registrations can be ended from here */

struct hawk_npu_info {
	__u32 abi_version;
	__u32 provider;
	__u32 channels;
	__u32 flags;
	__u64 channel_bytes;	/* of every channel; 0 where each has its own (HAWK_NPU_DMABUF) */
	__u64 page_bytes;	/* what EXPORT's offset and length must be multiples of */
};

struct hawk_npu_channel {
	__u32 channel;
	__u32 flags;
};

struct hawk_npu_range {
	__u32 channel;
	__u32 flags;
	__u64 offset;
	__u64 nbytes;
};

struct hawk_npu_export {
	__u32 channel;
	__u32 flags;
	__u64 offset;
	__u64 nbytes;
	__s32 fd;		/* out: the dma-buf, close-on-exec */
	__u32 reserved;
};

struct hawk_npu_adopt {
	__s32 fd;		/* in: a dma-buf; it stays the caller's */
	__u32 channel;		/* out */
	__u64 nbytes;		/* out */
};

struct hawk_npu_checksum {
	__u32 channel;
	__u32 flags;
	__u64 offset;
	__u64 nbytes;
	__u64 value;		/* out */
};

#define HAWK_NPU_IOC_MAGIC	0xB7

#define HAWK_NPU_INFO		_IOR(HAWK_NPU_IOC_MAGIC, 0x00, struct hawk_npu_info)

/*
 * Makes a channel this open's, its bytes zero.  EBUSY: someone has it, or can still reach it.
 * EBADF: the descriptor was not opened for writing, which ADOPT asks for, too.
 */
#define HAWK_NPU_CLAIM		_IOW(HAWK_NPU_IOC_MAGIC, 0x01, struct hawk_npu_channel)

/*
 * A range of a claimed channel as a dma-buf, for drivers to import and processes to mmap: bytes
 * without the device. Nobody new gets at them once the channel is revoked, reset or no longer
 * claimed.  Where DMA is not coherent a process says when it begins and ends its access
 * (DMA_BUF_IOCTL_SYNC).
 */
#define HAWK_NPU_EXPORT		_IOWR(HAWK_NPU_IOC_MAGIC, 0x02, struct hawk_npu_export)

/*
 * Ends the exports and peer registrations of a channel.  EBUSY: a pinned importer holds an export
 * (then nothing was ended), or somebody who was told has not let go yet (then nothing new can
 * begin: try again).
 */
#define HAWK_NPU_REVOKE		_IOW(HAWK_NPU_IOC_MAGIC, 0x03, struct hawk_npu_channel)

/*
 * REVOKE, then zeroes the channel.  EBUSY as for REVOKE, and while pages are pinned by a
 * registration.
 */
#define HAWK_NPU_RESET		_IOW(HAWK_NPU_IOC_MAGIC, 0x04, struct hawk_npu_channel)

/* Returns when all bytes that reached the device before the call can be read by it. */
#define HAWK_NPU_FLUSH		_IOW(HAWK_NPU_IOC_MAGIC, 0x05, struct hawk_npu_range)

/* FNV-1a, 64 bits, of the bytes as the kernel sees them. */
#define HAWK_NPU_CHECKSUM	_IOWR(HAWK_NPU_IOC_MAGIC, 0x06, struct hawk_npu_checksum)

/*
 * HAWK_NPU_DMABUF: takes another driver's dma-buf as this open's next free channel.  Its mapping
 * here is an address to register with a NIC and cannot be touched; map the dma-buf itself for that.
 * EFAULT: the answer cannot be written where it belongs, and nothing was taken.
 */
#define HAWK_NPU_ADOPT		_IOWR(HAWK_NPU_IOC_MAGIC, 0x07, struct hawk_npu_adopt)

#endif
