/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What both test modules do: they come and go with a device of their own, look whether a scatter
 * list is one that a NIC could use, and copy through its DMA addresses as a NIC would.  The lab's
 * machine has no IOMMU, so that a DMA address is a physical one.
 */
#ifndef HAWK_NPU_DMA_COPY_H
#define HAWK_NPU_DMA_COPY_H

#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/highmem.h>
#include <linux/io.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

/* What can be wrong with a scatter list. */
#define DMA_UNALIGNED	1	/* an entry that does not begin and end at a page */
#define DMA_NOT_COVERED	2	/* the entries together are not as long as what was asked for */
#define DMA_OVERLAP	4	/* two entries share bytes */
#define DMA_EMPTY	8	/* an entry without length */

static inline u32 dma_faults(struct sg_table *sgt, u64 nbytes)
{
	struct scatterlist *a, *b;
	u64 covered = 0;
	u32 faults = 0;
	int i, j;

	for_each_sgtable_dma_sg(sgt, a, i) {
		if (!PAGE_ALIGNED(sg_dma_address(a)) || !PAGE_ALIGNED(sg_dma_len(a)))
			faults |= DMA_UNALIGNED;
		if (!sg_dma_len(a))
			faults |= DMA_EMPTY;
		covered += sg_dma_len(a);
		/* Quadratic: for lists of any length that a test has patience for. */
		if (i > 512)
			continue;
		for_each_sgtable_dma_sg(sgt, b, j) {
			if (j >= i)
				break;
			if (sg_dma_address(a) < sg_dma_address(b) + sg_dma_len(b) &&
			    sg_dma_address(b) < sg_dma_address(a) + sg_dma_len(a))
				faults |= DMA_OVERLAP;
		}
	}
	if (covered != nbytes)
		faults |= DMA_NOT_COVERED;
	return faults;
}

/* At most a page, within one. */
static inline int dma_copy_piece(dma_addr_t address, void *bytes, size_t n, bool write)
{
	void __iomem *io;

	if (page_is_ram(PHYS_PFN(address))) {
		struct page *page = pfn_to_page(PHYS_PFN(address));

		if (write)
			memcpy_to_page(page, offset_in_page(address), bytes, n);
		else
			memcpy_from_page(bytes, page, offset_in_page(address), n);
		return 0;
	}
	io = ioremap(address, n);
	if (!io)
		return -ENOMEM;
	if (write)
		memcpy_toio(io, bytes, n);
	else
		memcpy_fromio(bytes, io, n);
	iounmap(io);
	return 0;
}

/* Copies [offset, offset + n) of the list from or to a kernel buffer. */
static inline int dma_copy(struct sg_table *sgt, u64 offset, void *bytes, u64 n, bool write)
{
	struct scatterlist *sg;
	u64 start = 0, done = 0;
	int i, ret;

	for_each_sgtable_dma_sg(sgt, sg, i) {
		while (done < n && offset + done < start + sg_dma_len(sg)) {
			dma_addr_t address = sg_dma_address(sg) + (offset + done - start);
			size_t piece = min_t(u64, PAGE_SIZE - offset_in_page(address),
					     min_t(u64, n - done, start + sg_dma_len(sg) - offset - done));

			ret = dma_copy_piece(address, bytes + done, piece, write);
			if (ret)
				return ret;
			done += piece;
		}
		start += sg_dma_len(sg);
	}
	return done == n ? 0 : -EINVAL;
}

/* A device that the module makes; its DMA operations, where it has its own. */
static inline struct platform_device *make_device(const char *name, const struct dma_map_ops *ops)
{
	struct platform_device *made = platform_device_register_simple(name, PLATFORM_DEVID_NONE, NULL, 0);
	int ret;

	if (IS_ERR(made))
		return made;
	/* Before the mask: newer kernels see only then whether it has to be synchronised. */
	if (ops)
		set_dma_ops(&made->dev, ops);
	ret = dma_set_mask_and_coherent(&made->dev, DMA_BIT_MASK(64));
	if (!ret)
		return made;
	platform_device_unregister(made);
	return ERR_PTR(ret);
}

/* The module's own device, for requests that name none, and the file by which it is driven. */
static inline int add_devices(struct platform_device **own, struct miscdevice *misc)
{
	int ret;

	*own = make_device(KBUILD_MODNAME, NULL);
	if (IS_ERR(*own))
		return PTR_ERR(*own);
	ret = misc_register(misc);
	if (ret)
		platform_device_unregister(*own);
	return ret;
}

static inline void remove_devices(struct platform_device *own, struct miscdevice *misc)
{
	misc_deregister(misc);
	platform_device_unregister(own);
}

/*
 * The device that a request names: 0 for the module's own, or a PCI device as domain << 16 | bus <<
 * 8 | devfn.
 */
static inline struct device *dma_device_of(u32 which, struct platform_device *own)
{
	struct pci_dev *pdev;

	if (!which)
		return get_device(&own->dev);
	pdev = pci_get_domain_bus_and_slot(which >> 16, which >> 8 & 0xff, which & 0xff);
	return pdev ? &pdev->dev : NULL;
}

#endif
