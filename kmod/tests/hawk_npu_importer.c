// SPDX-License-Identifier: GPL-2.0
/*
 * An importer of dma-bufs, driven from user space: attach, map, look at the addresses, copy, be
 * revoked.
 */
#include <linux/delay.h>
#include <linux/dma-buf.h>
#include <linux/dma-resv.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/version.h>

#include "dma_bounce.h"
#include "dma_copy.h"
#include "hawk_npu_importer.h"

#define COPY_MAX	(4UL << 20)

struct importer {
	struct mutex lock;
	struct dma_buf *buf;
	struct dma_buf_attachment *attachment;
	struct device *dev;
	u32 how;
	bool dawdles;
	struct sg_table *sgt;	/* under the buffer's reservation lock */
	u32 told;		/* too */
};

static struct platform_device *own, *bouncing;

static void unmap_locked(struct importer *it)
{
	if (!it->sgt)
		return;
	dma_buf_unmap_attachment(it->attachment, it->sgt, DMA_BIDIRECTIONAL);
	it->sgt = NULL;
}

static void told(struct dma_buf_attachment *attachment)
{
	struct importer *it = attachment->importer_priv;

	dma_resv_assert_held(attachment->dmabuf->resv);
	it->told++;
	if (it->dawdles)
		msleep(1000);
	if (it->how == IMPORTER_DYNAMIC)
		unmap_locked(it);
}

static const struct dma_buf_attach_ops with_p2p = { .allow_peer2peer = true, .move_notify = told };
static const struct dma_buf_attach_ops without_p2p = { .move_notify = told };

static int do_attach(struct importer *it, struct importer_attach *arg)
{
	const struct dma_buf_attach_ops *ops = arg->flags & IMPORTER_NO_P2P ? &without_p2p : &with_p2p;
	int ret;

	if (it->attachment)
		return -EBUSY;
	if (arg->flags & IMPORTER_BOUNCES && !CAN_BOUNCE)
		return -EOPNOTSUPP;
	it->dev = dma_device_of(arg->device, arg->flags & IMPORTER_BOUNCES ? bouncing : own);
	if (!it->dev)
		return -ENXIO;
	it->buf = dma_buf_get(arg->fd);
	ret = PTR_ERR_OR_ZERO(it->buf);
	if (ret)
		goto put_device;
	it->how = arg->how;
	it->dawdles = arg->flags & IMPORTER_DAWDLES;
	it->told = 0;
	it->attachment = arg->how == IMPORTER_STATIC ? dma_buf_attach(it->buf, it->dev) :
			 dma_buf_dynamic_attach(it->buf, it->dev, ops, it);
	ret = PTR_ERR_OR_ZERO(it->attachment);
	if (ret)
		goto put_buf;
	if (arg->how == IMPORTER_PINNED) {
		dma_resv_lock(it->buf->resv, NULL);
		ret = dma_buf_pin(it->attachment);
		dma_resv_unlock(it->buf->resv);
		if (ret)
			goto detach;
	}
	arg->peer2peer = it->attachment->peer2peer;
	return 0;
detach:
	dma_buf_detach(it->buf, it->attachment);
put_buf:
	dma_buf_put(it->buf);
put_device:
	put_device(it->dev);
	it->attachment = NULL;
	return ret;
}

static int do_map(struct importer *it, struct importer_map *arg)
{
	struct scatterlist *sg;
	int i, ret = 0;

	if (!it->attachment)
		return -ENODEV;
	if (it->how == IMPORTER_STATIC && it->sgt)
		return -EBUSY;
	if (it->how == IMPORTER_STATIC) {
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
		struct sg_table *sgt = dma_buf_map_attachment_unlocked(it->attachment, DMA_BIDIRECTIONAL);
#else
		struct sg_table *sgt = dma_buf_map_attachment(it->attachment, DMA_BIDIRECTIONAL);
#endif
		if (IS_ERR(sgt))
			return PTR_ERR(sgt);
		it->sgt = sgt;
		dma_resv_lock(it->buf->resv, NULL);
	} else {
		struct sg_table *sgt;

		dma_resv_lock(it->buf->resv, NULL);
		sgt = it->sgt ? ERR_PTR(-EBUSY) : dma_buf_map_attachment(it->attachment, DMA_BIDIRECTIONAL);
		ret = PTR_ERR_OR_ZERO(sgt);
		if (!ret)
			it->sgt = sgt;
	}
	if (!ret) {
		arg->entries = it->sgt->nents;
		arg->faults = dma_faults(it->sgt, it->buf->size);
		arg->nbytes = 0;
		for_each_sgtable_dma_sg(it->sgt, sg, i)
			arg->nbytes += sg_dma_len(sg);
	}
	dma_resv_unlock(it->buf->resv);
	return ret;
}

static int do_copy(struct importer *it, const struct importer_copy *arg)
{
	void __user *user = u64_to_user_ptr(arg->user);
	void *bytes;
	int ret;

	if (!it->attachment)
		return -ENODEV;
	if (!arg->nbytes || arg->nbytes > COPY_MAX)
		return -EINVAL;
	bytes = kvzalloc(arg->nbytes, GFP_KERNEL);
	if (!bytes)
		return -ENOMEM;
	ret = arg->write && copy_from_user(bytes, user, arg->nbytes) ? -EFAULT : 0;
	if (!ret) {
		dma_resv_lock(it->buf->resv, NULL);
		ret = it->sgt ? dma_copy(it->sgt, arg->offset, bytes, arg->nbytes, arg->write) : -ENODEV;
		dma_resv_unlock(it->buf->resv);
	}
	if (!ret && !arg->write && copy_to_user(user, bytes, arg->nbytes))
		ret = -EFAULT;
	kvfree(bytes);
	return ret;
}

static int do_unmap(struct importer *it)
{
	if (!it->attachment)
		return -ENODEV;
	if (it->how == IMPORTER_STATIC) {
		if (!it->sgt)
			return 0;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0)
		dma_buf_unmap_attachment_unlocked(it->attachment, it->sgt, DMA_BIDIRECTIONAL);
#else
		dma_buf_unmap_attachment(it->attachment, it->sgt, DMA_BIDIRECTIONAL);
#endif
		it->sgt = NULL;
		return 0;
	}
	dma_resv_lock(it->buf->resv, NULL);
	unmap_locked(it);
	dma_resv_unlock(it->buf->resv);
	return 0;
}

static int do_detach(struct importer *it)
{
	int ret = do_unmap(it);

	if (ret)
		return ret;
	if (it->how == IMPORTER_PINNED) {
		dma_resv_lock(it->buf->resv, NULL);
		dma_buf_unpin(it->attachment);
		dma_resv_unlock(it->buf->resv);
	}
	dma_buf_detach(it->buf, it->attachment);
	dma_buf_put(it->buf);
	put_device(it->dev);
	it->attachment = NULL;
	return 0;
}

static int do_status(struct importer *it, struct importer_status *arg)
{
	arg->attached = !!it->attachment;
	if (!it->attachment)
		return 0;
	dma_resv_lock(it->buf->resv, NULL);
	arg->mapped = !!it->sgt;
	arg->told = it->told;
	dma_resv_unlock(it->buf->resv);
	return 0;
}

static long importer_ioctl(struct file *filp, unsigned int cmd, unsigned long argument)
{
	void __user *user = (void __user *)argument;
	struct importer *it = filp->private_data;
	union {
		struct importer_attach attach;
		struct importer_map map;
		struct importer_copy copy;
		struct importer_status status;
	} arg = {};
	int ret;

	if (_IOC_TYPE(cmd) != IMPORTER_MAGIC || _IOC_SIZE(cmd) > sizeof(arg))
		return -ENOTTY;
	if ((_IOC_DIR(cmd) & _IOC_WRITE) && copy_from_user(&arg, user, _IOC_SIZE(cmd)))
		return -EFAULT;
	/*
	 * The copy's user buffer may be a mapping whose faults take other locks, but never this
	 * one.
	 */
	mutex_lock(&it->lock);
	switch (cmd) {
	case IMPORTER_ATTACH:
		ret = do_attach(it, &arg.attach);
		break;
	case IMPORTER_MAP:
		ret = do_map(it, &arg.map);
		break;
	case IMPORTER_COPY:
		ret = do_copy(it, &arg.copy);
		break;
	case IMPORTER_UNMAP:
		ret = do_unmap(it);
		break;
	case IMPORTER_DETACH:
		ret = do_detach(it);
		break;
	case IMPORTER_STATUS:
		ret = do_status(it, &arg.status);
		break;
	default:
		ret = -ENOTTY;
	}
	mutex_unlock(&it->lock);
	if (!ret && (_IOC_DIR(cmd) & _IOC_READ) && copy_to_user(user, &arg, _IOC_SIZE(cmd)))
		ret = -EFAULT;
	return ret;
}

static int importer_open(struct inode *inode, struct file *filp)
{
	struct importer *it = kzalloc(sizeof(*it), GFP_KERNEL);

	if (!it)
		return -ENOMEM;
	mutex_init(&it->lock);
	filp->private_data = it;
	return 0;
}

static int importer_release(struct inode *inode, struct file *filp)
{
	struct importer *it = filp->private_data;

	do_detach(it);
	kfree(it);
	return 0;
}

static const struct file_operations importer_fops = {
	.owner = THIS_MODULE,
	.open = importer_open,
	.release = importer_release,
	.unlocked_ioctl = importer_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice importer_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = KBUILD_MODNAME,
	.fops = &importer_fops,
	.mode = 0600,
};

static int __init importer_init(void)
{
	int ret;

	bouncing = make_device(KBUILD_MODNAME "_bouncing", &bounce_ops);
	if (IS_ERR(bouncing))
		return PTR_ERR(bouncing);
	ret = add_devices(&own, &importer_misc);
	if (ret)
		platform_device_unregister(bouncing);
	return ret;
}

static void __exit importer_exit(void)
{
	remove_devices(own, &importer_misc);
	platform_device_unregister(bouncing);
}

module_init(importer_init);
module_exit(importer_exit);
MODULE_DESCRIPTION("Imports dma-bufs for the tests of hawk_npu");
MODULE_LICENSE("GPL");
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
