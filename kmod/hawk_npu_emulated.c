// SPDX-License-Identifier: GPL-2.0
/*
 * An NPU made of this machine's pages, for kernels and tests without one.
 *
 * Every claim takes new, zeroed pages, charged to the claimer's control group.  A page that
 * somebody else still holds when its region is given back (a memory registration that outlives its
 * owner) goes to no one: it is kept until this module's reference is the last, and counted
 * meanwhile.
 */
#include <linux/dma-mapping.h>
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "hawk_npu_internal.h"

#define KEPT_LOOK	(HZ / 5)

static unsigned int emulated;
module_param(emulated, uint, 0444);
MODULE_PARM_DESC(emulated, "how many emulated devices to make (0)");

static unsigned int channels = 8;
module_param(channels, uint, 0444);
MODULE_PARM_DESC(channels, "memory channels of an emulated device, 1 to 64 (8)");

static unsigned int channel_kib = 16384;
module_param(channel_kib, uint, 0444);
MODULE_PARM_DESC(channel_kib, "KiB in each channel of an emulated device (16384)");

#define MAX_EMULATED	16

static struct hnpu_device *devices[MAX_EMULATED];

struct pages {
	unsigned long count;
	struct page *page[];
};

static void look_at_kept(struct work_struct *work);
static DECLARE_DELAYED_WORK(kept_work, look_at_kept);
static LIST_HEAD(kept);
static DEFINE_SPINLOCK(kept_lock);

static void look_at_kept(struct work_struct *work)
{
	struct page *page, *next;
	LIST_HEAD(over);

	spin_lock(&kept_lock);
	list_for_each_entry_safe(page, next, &kept, lru)
		if (page_ref_count(page) == 1)
			list_move(&page->lru, &over);
	if (!list_empty(&kept))
		queue_delayed_work(hnpu_wq, &kept_work, KEPT_LOOK);
	spin_unlock(&kept_lock);
	list_for_each_entry_safe(page, next, &over, lru) {
		list_del(&page->lru);
		put_page(page);
		hnpu_add(HNPU_PAGES_KEPT, -1);
	}
}

static void give_back_pages(struct pages *pages)
{
	unsigned long i;
	LIST_HEAD(held);

	for (i = 0; i < pages->count; i++) {
		struct page *page = pages->page[i];

		if (!page)
			break;
		hnpu_add(HNPU_PAGES, -1);
		if (page_ref_count(page) > 1) {
			hnpu_add(HNPU_PAGES_KEPT, 1);
			list_add(&page->lru, &held);
		} else {
			put_page(page);
		}
		if (!(i & 1023))
			cond_resched();
	}
	kvfree(pages);
	if (list_empty(&held))
		return;
	spin_lock(&kept_lock);
	list_splice(&held, &kept);
	queue_delayed_work(hnpu_wq, &kept_work, KEPT_LOOK);
	spin_unlock(&kept_lock);
}

static int emulated_claim(struct hnpu_region *region, struct dma_buf *source)
{
	unsigned long i, n = region->nbytes >> PAGE_SHIFT;
	struct pages *pages;

	pages = kvzalloc(struct_size(pages, page, n), GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	if (!pages)
		return -ENOMEM;
	pages->count = n;
	for (i = 0; i < n; i++) {
		if (!hnpu_inject(HNPU_AT_PAGE))
			pages->page[i] = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN);
		if (!pages->page[i] || fatal_signal_pending(current))
			goto fail;
		hnpu_add(HNPU_PAGES, 1);
		if (!(i & 1023))
			cond_resched();
	}
	region->priv = pages;
	return 0;
fail:
	if (pages->page[i])
		hnpu_add(HNPU_PAGES, 1);
	give_back_pages(pages);
	return -ENOMEM;
}

static void emulated_give_back(struct hnpu_region *region)
{
	give_back_pages(region->priv);
}

static bool emulated_busy(struct hnpu_region *region)
{
	struct pages *pages = region->priv;
	unsigned long i;

	for (i = 0; i < pages->count; i++)
		if (folio_maybe_dma_pinned(page_folio(pages->page[i])))
			return true;
	return false;
}

static int emulated_mmap(struct hnpu_region *region, u64 offset, struct vm_area_struct *vma)
{
	return 0;
}

static vm_fault_t emulated_fault(struct hnpu_region *region, u64 offset, struct vm_fault *vmf)
{
	struct pages *pages = region->priv;

	/* A page, not a page frame: a registration of user memory can pin it. */
	vmf->page = pages->page[offset >> PAGE_SHIFT];
	get_page(vmf->page);
	return 0;
}

static void emulated_sync(struct hnpu_mapping *m, bool for_cpu)
{
	if (for_cpu)
		dma_sync_sgtable_for_cpu(m->dev, &m->sgt, m->dir);
	else
		dma_sync_sgtable_for_device(m->dev, &m->sgt, m->dir);
}

static int emulated_map(struct hnpu_region *region, struct hnpu_mapping *m)
{
	struct pages *pages = region->priv;
	unsigned int most = ALIGN_DOWN(dma_get_max_seg_size(m->dev), PAGE_SIZE);
	int ret;

	if (hnpu_inject(HNPU_AT_MAP_TABLE))
		return -ENOMEM;
	ret = sg_alloc_table_from_pages_segment(&m->sgt, pages->page + (m->offset >> PAGE_SHIFT),
						m->nbytes >> PAGE_SHIFT, 0, m->nbytes,
						max_t(unsigned int, most, PAGE_SIZE), GFP_KERNEL);
	if (ret)
		return ret;
	/*
	 * Several importers may have the same pages, so no mapping may take them for its own:
	 * what a mapping would synchronise by itself is done by emulated_sync, here and whenever
	 * a processor begins or ends its access.
	 */
	ret = hnpu_inject(HNPU_AT_MAP_DMA) ? -EIO :
	      dma_map_sgtable(m->dev, &m->sgt, m->dir, DMA_ATTR_SKIP_CPU_SYNC);
	if (ret)
		sg_free_table(&m->sgt);
	else
		emulated_sync(m, false);
	return ret;
}

static void emulated_unmap(struct hnpu_region *region, struct hnpu_mapping *m)
{
	emulated_sync(m, true);
	dma_unmap_sgtable(m->dev, &m->sgt, m->dir, DMA_ATTR_SKIP_CPU_SYNC);
	sg_free_table(&m->sgt);
}

static int emulated_read(struct hnpu_region *region, u64 offset, void *to, size_t n)
{
	struct pages *pages = region->priv;

	memcpy_from_page(to, pages->page[offset >> PAGE_SHIFT], offset_in_page(offset), n);
	return 0;
}

static int emulated_zero(struct hnpu_region *region)
{
	struct pages *pages = region->priv;
	unsigned long i;

	for (i = 0; i < pages->count; i++) {
		clear_highpage(pages->page[i]);
		cond_resched();
	}
	return 0;
}

static int emulated_flush(struct hnpu_region *region, u64 offset, u64 n)
{
	/*
	 * The pages are in the machine's own memory: once the mappings were synchronised, order is
	 * all there is to ask for.
	 */
	mb();
	return 0;
}

static const struct hnpu_provider emulated_ops = {
	.kind = HAWK_NPU_EMULATED,
	.flags = HAWK_NPU_CAN_EXPORT | HAWK_NPU_HAS_PAGES,
	.claim = emulated_claim,
	.give_back = emulated_give_back,
	.busy = emulated_busy,
	.mmap = emulated_mmap,
	.fault = emulated_fault,
	.map = emulated_map,
	.unmap = emulated_unmap,
	.sync = emulated_sync,
	.read = emulated_read,
	.zero = emulated_zero,
	.flush = emulated_flush,
};

int hnpu_emulated_init(void)
{
	u64 nbytes = (u64)channel_kib << 10;
	unsigned int i;

	if (emulated > MAX_EMULATED || !channels || channels > HAWK_NPU_MAX_CHANNELS ||
	    !nbytes || !PAGE_ALIGNED(nbytes))
		return -EINVAL;
	for (i = 0; i < emulated; i++) {
		struct hnpu_device *dev = hnpu_device_add(&emulated_ops, NULL, NULL, channels, nbytes);

		if (IS_ERR(dev)) {
			hnpu_emulated_exit();
			return PTR_ERR(dev);
		}
		devices[i] = dev;
	}
	return 0;
}

void hnpu_emulated_exit(void)
{
	struct page *page, *next;
	int i;

	for (i = 0; i < MAX_EMULATED; i++)
		if (devices[i])
			hnpu_device_remove(devices[i]);
	/* Who holds a page still does: it is freed when they let go, without this module. */
	cancel_delayed_work_sync(&kept_work);
	list_for_each_entry_safe(page, next, &kept, lru) {
		list_del(&page->lru);
		put_page(page);
		hnpu_add(HNPU_PAGES_KEPT, -1);
	}
}
