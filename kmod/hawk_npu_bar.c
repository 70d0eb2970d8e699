// SPDX-License-Identifier: GPL-2.0
/*
 * A PCI device's window as memory channels.
 *
 * Binds to QEMU's ivshmem by itself and to other devices by the driver's new_id.  The window has no
 * pages: it is mapped as page frames, and for DMA as a resource, which works only between devices
 * whose buses allow it.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>

#include "hawk_npu_internal.h"

#define PCI_DEVICE_IVSHMEM	0x1110

static int bar_index = 2;
module_param(bar_index, int, 0444);
MODULE_PARM_DESC(bar_index, "which BAR of a PCI device is its memory window (2)");

static unsigned int bar_channels = 8;
module_param(bar_channels, uint, 0444);
MODULE_PARM_DESC(bar_channels, "how many channels a window is divided into, 1 to 64 (8)");

static bool assume_p2p;
module_param(assume_p2p, bool, 0444);
MODULE_PARM_DESC(assume_p2p,
		 "let every device map a window, where the administrator knows that the buses carry it and the kernel cannot tell (N)");

struct window {
	struct pci_dev *pdev;
	struct hnpu_device *dev;
	phys_addr_t start;
	void __iomem *io;
	bool combine;		/* writes may be gathered */
	DECLARE_BITMAP(taken, HAWK_NPU_MAX_CHANNELS);
};

static struct window *window_of(struct hnpu_region *region)
{
	return region->dev->priv;
}

static u64 at(struct hnpu_region *region, u64 offset)
{
	return region->channel * region->dev->channel_bytes + offset;
}

static int bar_zero(struct hnpu_region *region)
{
	void __iomem *io = window_of(region)->io + at(region, 0);
	u64 done, n;

	for (done = 0; done < region->nbytes; done += n) {
		if (fatal_signal_pending(current))
			return -EINTR;
		n = min_t(u64, region->nbytes - done, SZ_1M);
		memset_io(io + done, 0, n);
		cond_resched();
	}
	/* A read comes back only after the writes before it. */
	readl(io);
	return 0;
}

static void bar_give_back(struct hnpu_region *region)
{
	clear_bit(region->channel, window_of(region)->taken);
}

static int bar_claim(struct hnpu_region *region, struct dma_buf *source)
{
	int ret;

	if (test_and_set_bit(region->channel, window_of(region)->taken))
		return -EBUSY;
	/* The next owner shall not read what the last one left. */
	ret = bar_zero(region);
	if (ret)
		bar_give_back(region);
	return ret;
}

static int bar_mmap(struct hnpu_region *region, u64 offset, struct vm_area_struct *vma)
{
	/* Filled by faults, so that removal finds whatever is there: see vma_fault. */
	hnpu_vm_flags_set(vma, VM_IO | VM_PFNMAP);
	if (window_of(region)->combine)
		vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
	else
		vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return 0;
}

/* All of the 2 MiB around the fault that lie in the mapping: one fault instead of 512. */
static vm_fault_t bar_fault(struct hnpu_region *region, u64 offset, struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long here = vmf->address & PAGE_MASK;
	unsigned long from = max(vma->vm_start, ALIGN_DOWN(here, SZ_2M));
	unsigned long to = min(vma->vm_end, ALIGN_DOWN(here, SZ_2M) + SZ_2M);
	phys_addr_t phys = window_of(region)->start + at(region, offset);
	unsigned long address;
	vm_fault_t ret;

	ret = vmf_insert_pfn(vma, here, PHYS_PFN(phys));
	if (ret != VM_FAULT_NOPAGE)
		return ret;
	for (address = from; address < to; address += PAGE_SIZE)
		if (vmf_insert_pfn(vma, address, PHYS_PFN(phys + address - here)) != VM_FAULT_NOPAGE)
			break;
	return VM_FAULT_NOPAGE;
}

static bool bar_reachable(struct hnpu_region *region, struct device *dev)
{
	/* Without CONFIG_PCI_P2PDMA the answer is always no. */
	return assume_p2p || pci_p2pdma_distance(window_of(region)->pdev, dev, false) >= 0;
}

static int bar_map(struct hnpu_region *region, struct hnpu_mapping *m)
{
	u64 most = max_t(u64, ALIGN_DOWN(min_t(u64, dma_get_max_seg_size(m->dev), SZ_2G), PAGE_SIZE), PAGE_SIZE);
	struct scatterlist *sg;
	dma_addr_t address;
	u64 left = m->nbytes;
	int i, ret;

	ret = hnpu_inject(HNPU_AT_MAP_TABLE) ? -ENOMEM :
	      sg_alloc_table(&m->sgt, DIV_ROUND_UP_ULL(m->nbytes, most), GFP_KERNEL);
	if (ret)
		return ret;
	address = dma_map_resource(m->dev, window_of(region)->start + at(region, m->offset), m->nbytes,
				   m->dir, DMA_ATTR_SKIP_CPU_SYNC);
	if (hnpu_inject(HNPU_AT_MAP_DMA) && !dma_mapping_error(m->dev, address)) {
		dma_unmap_resource(m->dev, address, m->nbytes, m->dir, DMA_ATTR_SKIP_CPU_SYNC);
		address = DMA_MAPPING_ERROR;
	}
	if (dma_mapping_error(m->dev, address)) {
		sg_free_table(&m->sgt);
		return -EIO;
	}
	/* No pages: addresses and lengths for the device are all that an importer may look at. */
	for_each_sgtable_dma_sg(&m->sgt, sg, i) {
		unsigned int n = min(left, most);

		sg_set_page(sg, NULL, n, 0);
		sg_dma_address(sg) = address;
		sg_dma_len(sg) = n;
		address += n;
		left -= n;
	}
	return 0;
}

static void bar_unmap(struct hnpu_region *region, struct hnpu_mapping *m)
{
	dma_unmap_resource(m->dev, sg_dma_address(m->sgt.sgl), m->nbytes, m->dir, DMA_ATTR_SKIP_CPU_SYNC);
	sg_free_table(&m->sgt);
}

static int bar_read(struct hnpu_region *region, u64 offset, void *to, size_t n)
{
	memcpy_fromio(to, window_of(region)->io + at(region, offset), n);
	return 0;
}

static int bar_flush(struct hnpu_region *region, u64 offset, u64 n)
{
	/* What this processor still holds back goes out first. */
	mb();
	/* And a read comes back only after all writes that were before it. */
	readb(window_of(region)->io + at(region, offset + n - 1));
	return 0;
}

static const struct hnpu_provider bar_ops = {
	.kind = HAWK_NPU_BAR,
	.flags = HAWK_NPU_CAN_EXPORT,
	.claim = bar_claim,
	.give_back = bar_give_back,
	.mmap = bar_mmap,
	.fault = bar_fault,
	.reachable = bar_reachable,
	.map = bar_map,
	.unmap = bar_unmap,
	.read = bar_read,
	.zero = bar_zero,
	.flush = bar_flush,
};

static int bar_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct window *window;
	u64 channel_bytes;
	int ret;

	if (hnpu_inject(HNPU_AT_PROBE))
		return -ENOMEM;
	channel_bytes = ALIGN_DOWN(pci_resource_len(pdev, bar_index) / bar_channels, PAGE_SIZE);
	if (!(pci_resource_flags(pdev, bar_index) & IORESOURCE_MEM) || !channel_bytes) {
		dev_err(&pdev->dev, "BAR %d is no memory window for %u channels: %pR\n", bar_index,
			bar_channels, &pdev->resource[bar_index]);
		return -ENODEV;
	}
	window = kzalloc(sizeof(*window), GFP_KERNEL);
	if (!window)
		return -ENOMEM;
	window->pdev = pdev;
	window->start = pci_resource_start(pdev, bar_index);
	window->combine = pci_resource_flags(pdev, bar_index) & IORESOURCE_PREFETCH;
	ret = pci_enable_device_mem(pdev);
	if (ret)
		goto free;
	ret = pci_request_region(pdev, bar_index, KBUILD_MODNAME);
	if (ret)
		goto disable;
	window->io = window->combine ? pci_ioremap_wc_bar(pdev, bar_index) :
				       pci_ioremap_bar(pdev, bar_index);
	ret = -ENOMEM;
	if (!window->io)
		goto release;
	window->dev = hnpu_device_add(&bar_ops, window, &pdev->dev, bar_channels, channel_bytes);
	if (IS_ERR(window->dev)) {
		ret = PTR_ERR(window->dev);
		goto unmap;
	}
	pci_set_drvdata(pdev, window);
	return 0;
unmap:
	iounmap(window->io);
release:
	pci_release_region(pdev, bar_index);
disable:
	pci_disable_device(pdev);
free:
	kfree(window);
	return ret;
}

static void bar_remove(struct pci_dev *pdev)
{
	struct window *window = pci_get_drvdata(pdev);

	hnpu_device_remove(window->dev);
	iounmap(window->io);
	pci_release_region(pdev, bar_index);
	pci_disable_device(pdev);
	kfree(window);
}

/*
 * Not in the module's alias table: a virtual machine with an ivshmem for something else loads
 * nothing by it.
 */
static const struct pci_device_id bar_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_REDHAT_QUMRANET, PCI_DEVICE_IVSHMEM) },
	{ }
};

static struct pci_driver bar_driver = {
	.name = KBUILD_MODNAME,
	.id_table = bar_ids,
	.probe = bar_probe,
	.remove = bar_remove,
};

int hnpu_bar_init(void)
{
	if (bar_index < 0 || bar_index >= PCI_STD_NUM_BARS || !bar_channels ||
	    bar_channels > HAWK_NPU_MAX_CHANNELS)
		return -EINVAL;
	return pci_register_driver(&bar_driver);
}

void hnpu_bar_exit(void)
{
	pci_unregister_driver(&bar_driver);
}
