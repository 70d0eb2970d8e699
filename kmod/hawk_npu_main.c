// SPDX-License-Identifier: GPL-2.0
/*
 * Memory channels of an NPU that a NIC can reach.
 *
 * Devices come from providers: pages that emulate an NPU, a PCI device's window, and windows
 * adopted from other drivers.  Each is a character device whose open files own channels, map them,
 * export them as dma-bufs, and have them registered through the peer-memory interface where the
 * RDMA stack has one.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/idr.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "hawk_npu_internal.h"

struct workqueue_struct *hnpu_wq;
static DEFINE_IDA(device_ids);

static void device_free(struct kref *ref)
{
	struct hnpu_device *dev = container_of(ref, struct hnpu_device, ref);

	ida_free(&device_ids, dev->id);
	kfree(dev);
}

void hnpu_device_put(struct hnpu_device *dev)
{
	kref_put(&dev->ref, device_free);
}

struct hnpu_device *hnpu_device_add(const struct hnpu_provider *ops, void *priv, struct device *parent,
				    u32 channels, u64 channel_bytes)
{
	struct hnpu_device *dev;
	int ret;

	/* Of more, the file offsets of mmap would run into those of the next channel. */
	if (channel_bytes > 1ULL << HAWK_NPU_MAP_SHIFT)
		return ERR_PTR(-EINVAL);
	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	dev->id = ida_alloc(&device_ids, GFP_KERNEL);
	if (dev->id < 0) {
		ret = dev->id;
		kfree(dev);
		return ERR_PTR(ret);
	}
	kref_init(&dev->ref);
	init_rwsem(&dev->live);
	mutex_init(&dev->files_lock);
	INIT_LIST_HEAD(&dev->files);
	init_waitqueue_head(&dev->idle);
	dev->ops = ops;
	dev->priv = priv;
	dev->channels = channels;
	dev->channel_bytes = channel_bytes;
	snprintf(dev->name, sizeof(dev->name), "hawk_npu%d", dev->id);
	dev->misc.minor = MISC_DYNAMIC_MINOR;
	dev->misc.name = dev->name;
	dev->misc.fops = &hnpu_fops;
	dev->misc.parent = parent;
	/* Who may reach device memory is for the administrator to say, by a udev rule. */
	dev->misc.mode = 0600;
	ret = misc_register(&dev->misc);
	if (ret) {
		hnpu_device_put(dev);
		return ERR_PTR(ret);
	}
	return dev;
}

/*
 * Returns when nobody can reach the device's memory any more.  Importers that pinned it cannot be
 * told to let go and are waited for: what comes after this call takes the addresses away under
 * their DMA.
 */
void hnpu_device_remove(struct hnpu_device *dev)
{
	struct hnpu_file *file;

	misc_deregister(&dev->misc);
	down_write(&dev->live);
	dev->gone = true;
	up_write(&dev->live);
	mutex_lock(&dev->files_lock);
	list_for_each_entry(file, &dev->files, node) {
		unmap_mapping_range(file->mapping, 0, 0, 1);
		hnpu_file_end(file);
	}
	mutex_unlock(&dev->files_lock);
	while (!wait_event_timeout(dev->idle, !atomic_read(&dev->claimed), 10 * HZ))
		pr_warn("%s: removal waits for %d channels that importers have pinned\n", dev->name,
			atomic_read(&dev->claimed));
	hnpu_device_put(dev);
}

static int __init hawk_npu_init(void)
{
	int ret;

	hnpu_wq = alloc_workqueue("hawk_npu", WQ_UNBOUND, 0);
	if (!hnpu_wq)
		return -ENOMEM;
	hnpu_stats_init();
	ret = hnpu_peer_init();
	if (ret)
		goto stats;
	ret = hnpu_emulated_init();
	if (ret)
		goto peer;
	ret = hnpu_dmabuf_init();
	if (ret)
		goto emulated;
	ret = hnpu_bar_init();
	if (ret)
		goto dmabuf;
	return 0;
dmabuf:
	hnpu_dmabuf_exit();
emulated:
	hnpu_emulated_exit();
peer:
	hnpu_peer_exit();
stats:
	hnpu_stats_exit();
	destroy_workqueue(hnpu_wq);
	return ret;
}

static void __exit hawk_npu_exit(void)
{
	hnpu_bar_exit();
	hnpu_dmabuf_exit();
	hnpu_emulated_exit();
	hnpu_peer_exit();
	destroy_workqueue(hnpu_wq);
	hnpu_stats_exit();
}

module_init(hawk_npu_init);
module_exit(hawk_npu_exit);
MODULE_AUTHOR("The HAWK authors");
MODULE_DESCRIPTION("Memory channels of an NPU that a NIC can reach");
MODULE_LICENSE("GPL");
MODULE_VERSION("1.0");
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
