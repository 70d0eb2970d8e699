/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A device that reaches no page itself: each mapping has a copy, which is brought up to date only when the
 * exporter synchronises.  So do devices whose DMA is bounced; here it shows whether it was done.
 */
#ifndef HAWK_NPU_DMA_BOUNCE_H
#define HAWK_NPU_DMA_BOUNCE_H

#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/string.h>

/* Kernels of which no driver needs such operations leave them out. */
#define CAN_BOUNCE	(IS_ENABLED(CONFIG_DMA_OPS) || IS_ENABLED(CONFIG_ARCH_HAS_DMA_OPS))

static inline void bounce(struct scatterlist *sgl, int n, bool to_device)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(sgl, sg, n, i) {
		void *copy = phys_to_virt(sg_dma_address(sg));

		if (to_device)
			memcpy(copy, sg_virt(sg), sg->length);
		else
			memcpy(sg_virt(sg), copy, sg->length);
	}
}

static inline void bounce_free(struct scatterlist *sgl, int n)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(sgl, sg, n, i)
		free_pages_exact(phys_to_virt(sg_dma_address(sg)), sg->length);
}

static inline int bounce_map_sg(struct device *dev, struct scatterlist *sgl, int n,
				enum dma_data_direction dir, unsigned long attrs)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(sgl, sg, n, i) {
		void *copy = alloc_pages_exact(sg->length, GFP_KERNEL | __GFP_ZERO);

		if (!copy) {
			bounce_free(sgl, i);
			return -ENOMEM;
		}
		sg_dma_address(sg) = virt_to_phys(copy);
		sg_dma_len(sg) = sg->length;
	}
	if (!(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		bounce(sgl, n, true);
	return n;
}

static inline void bounce_unmap_sg(struct device *dev, struct scatterlist *sgl, int n,
				   enum dma_data_direction dir, unsigned long attrs)
{
	if (!(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		bounce(sgl, n, false);
	bounce_free(sgl, n);
}

static inline void bounce_for_cpu(struct device *dev, struct scatterlist *sgl, int n,
				  enum dma_data_direction dir)
{
	bounce(sgl, n, false);
}

static inline void bounce_for_device(struct device *dev, struct scatterlist *sgl, int n,
				     enum dma_data_direction dir)
{
	bounce(sgl, n, true);
}

static const struct dma_map_ops bounce_ops = {
	.map_sg = bounce_map_sg,
	.unmap_sg = bounce_unmap_sg,
	.sync_sg_for_cpu = bounce_for_cpu,
	.sync_sg_for_device = bounce_for_device,
};

#endif
