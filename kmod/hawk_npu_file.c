// SPDX-License-Identifier: GPL-2.0
/* The character device: an open file owns what it claimed. */
#include <linux/build_bug.h>
#include <linux/compat.h>
#include <linux/dma-buf.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "hawk_npu_internal.h"

static int hnpu_open(struct inode *inode, struct file *filp)
{
	/* The misc core holds its lock, so the device cannot go before it is counted here. */
	struct hnpu_device *dev = container_of(filp->private_data, struct hnpu_device, misc);
	struct hnpu_file *file;

	file = hnpu_inject(HNPU_AT_OPEN) ? NULL : kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	if (!file)
		return -ENOMEM;
	mutex_init(&file->lock);
	file->dev = dev;
	file->mapping = filp->f_mapping;
	file->writable = filp->f_mode & FMODE_WRITE;
	kref_get(&dev->ref);
	mutex_lock(&dev->files_lock);
	list_add(&file->node, &dev->files);
	mutex_unlock(&dev->files_lock);
	filp->private_data = file;
	hnpu_add(HNPU_OPENS, 1);
	return nonseekable_open(inode, filp);
}

/* Ends all regions of one open; the device's removal and the file's release may both come. */
void hnpu_file_end(struct hnpu_file *file)
{
	struct hnpu_region *region;
	int i;

	for (i = 0; i < HAWK_NPU_MAX_CHANNELS; i++) {
		mutex_lock(&file->lock);
		region = file->regions[i];
		file->regions[i] = NULL;
		mutex_unlock(&file->lock);
		if (region)
			hnpu_region_end(region);
	}
}

static int hnpu_release(struct inode *inode, struct file *filp)
{
	struct hnpu_file *file = filp->private_data;
	struct hnpu_device *dev = file->dev;

	mutex_lock(&dev->files_lock);
	list_del(&file->node);
	mutex_unlock(&dev->files_lock);
	hnpu_file_end(file);
	kfree(file);
	hnpu_add(HNPU_OPENS, -1);
	hnpu_device_put(dev);
	return 0;
}

/* Takes the locks under which file->regions[channel] may be looked at; 0, or why not. */
static int slot_lock(struct hnpu_file *file, u32 channel)
{
	struct hnpu_device *dev = file->dev;
	int ret = -ENODEV;

	if (channel >= HAWK_NPU_MAX_CHANNELS)
		return -EINVAL;
	down_read(&dev->live);
	if (!dev->gone)
		ret = mutex_lock_interruptible(&file->lock);
	if (ret)
		up_read(&dev->live);
	return ret;
}

static void slot_unlock(struct hnpu_file *file)
{
	mutex_unlock(&file->lock);
	up_read(&file->dev->live);
}

/* The claimed region of a channel, held so that it stays while no lock is. */
static struct hnpu_region *region_of(struct hnpu_file *file, u32 channel)
{
	struct hnpu_region *region;
	int ret;

	ret = slot_lock(file, channel);
	if (ret)
		return ERR_PTR(ret);
	region = file->regions[array_index_nospec(channel, HAWK_NPU_MAX_CHANNELS)];
	ret = region ? hnpu_region_hold(region) : -EACCES;
	slot_unlock(file);
	return ret ? ERR_PTR(ret) : region;
}

static int do_info(struct hnpu_file *file, struct hawk_npu_info *info)
{
	struct hnpu_device *dev = file->dev;
	bool gone;

	down_read(&dev->live);
	gone = dev->gone;
	up_read(&dev->live);
	if (gone)
		return -ENODEV;
	info->abi_version = HAWK_NPU_ABI_VERSION;
	info->provider = dev->ops->kind;
	info->channels = dev->channels;
	info->flags = dev->ops->flags | hnpu_peer_flags();
	info->channel_bytes = dev->channel_bytes;
	info->page_bytes = PAGE_SIZE;
	return 0;
}

static int do_claim(struct hnpu_file *file, const struct hawk_npu_channel *arg)
{
	struct hnpu_region *region;
	u32 channel = arg->channel;
	int ret;

	if (arg->flags || channel >= file->dev->channels)
		return -EINVAL;
	if (file->dev->ops->kind == HAWK_NPU_DMABUF)
		return -EOPNOTSUPP;
	/* A claim is zeroed, and may be exported to those who write. */
	if (!file->writable)
		return -EBADF;
	channel = array_index_nospec(channel, HAWK_NPU_MAX_CHANNELS);
	ret = slot_lock(file, channel);
	if (ret)
		return ret;
	if (file->regions[channel]) {
		ret = -EBUSY;
	} else {
		region = hnpu_region_create(file->dev, channel, NULL);
		ret = PTR_ERR_OR_ZERO(region);
		if (!ret)
			file->regions[channel] = region;
	}
	slot_unlock(file);
	return ret;
}

/* Takes a channel back that the caller was not told of; who was quicker than that loses it. */
static void unadopt(struct hnpu_file *file, struct hnpu_region *region)
{
	bool there;

	mutex_lock(&file->lock);
	there = file->regions[region->channel] == region;
	if (there)
		file->regions[region->channel] = NULL;
	mutex_unlock(&file->lock);
	if (there)
		hnpu_region_end(region);
}

/* Apart from the others: a channel whose number does not reach the caller is not adopted. */
static int do_adopt(struct hnpu_file *file, struct hawk_npu_adopt __user *user)
{
	struct hnpu_region *region = NULL;
	struct hawk_npu_adopt arg;
	struct dma_buf *source;
	u32 channel;
	int ret;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (file->dev->ops->kind != HAWK_NPU_DMABUF)
		return -EOPNOTSUPP;
	if (!file->writable)
		return -EBADF;
	source = dma_buf_get(arg.fd);
	if (IS_ERR(source))
		return PTR_ERR(source);
	ret = slot_lock(file, 0);
	if (ret)
		goto put;
	for (channel = 0; channel < file->dev->channels && file->regions[channel]; channel++)
		;
	if (channel == file->dev->channels) {
		ret = -ENOSPC;
	} else {
		region = hnpu_region_create(file->dev, channel, source);
		ret = PTR_ERR_OR_ZERO(region);
		if (!ret) {
			file->regions[channel] = region;
			/* So that it is still this one that unadopt finds there. */
			kref_get(&region->ref);
			arg.channel = channel;
			arg.nbytes = region->nbytes;
		}
	}
	slot_unlock(file);
	if (ret)
		goto put;
	if (copy_to_user(user, &arg, sizeof(arg))) {
		unadopt(file, region);
		ret = -EFAULT;
	}
	hnpu_region_put(region);
put:
	dma_buf_put(source);
	return ret;
}

/* What is asked of a claimed channel; all these arguments begin as a hawk_npu_range does. */
static int do_on_region(struct hnpu_file *file, unsigned int cmd, const struct hawk_npu_range *arg, u64 *value)
{
	struct hnpu_region *region;
	int ret;

	static_assert(offsetof(struct hawk_npu_checksum, value) == sizeof(*arg));
	if (arg->flags)
		return -EINVAL;
	region = region_of(file, arg->channel);
	if (IS_ERR(region))
		return PTR_ERR(region);
	/* Without the locks: the RDMA core, which may be told, may be on its way through them. */
	switch (cmd) {
	case HAWK_NPU_REVOKE:
		ret = hnpu_region_revoke(region);
		break;
	case HAWK_NPU_RESET:
		ret = hnpu_region_reset(region);
		break;
	case HAWK_NPU_FLUSH:
		ret = hnpu_region_flush(region, arg->offset, arg->nbytes);
		break;
	default:
		ret = hnpu_region_checksum(region, arg->offset, arg->nbytes, value);
	}
	hnpu_region_drop(region);
	return ret;
}

/*
 * Apart from the others: the descriptor may be given out only when its number has reached the
 * caller.
 */
static int do_export(struct hnpu_file *file, struct hawk_npu_export __user *user)
{
	struct hawk_npu_export arg;
	struct hnpu_region *region;
	struct dma_buf *buf;
	int fd, ret;

	if (copy_from_user(&arg, user, sizeof(arg)))
		return -EFAULT;
	if (arg.flags || arg.reserved || !PAGE_ALIGNED(arg.offset) || !PAGE_ALIGNED(arg.nbytes))
		return -EINVAL;
	if (!(file->dev->ops->flags & HAWK_NPU_CAN_EXPORT))
		return -EOPNOTSUPP;
	ret = slot_lock(file, arg.channel);
	if (ret)
		return ret;
	region = file->regions[array_index_nospec(arg.channel, HAWK_NPU_MAX_CHANNELS)];
	if (!region)
		buf = ERR_PTR(-EACCES);
	else if (!hnpu_region_has(region, arg.offset, arg.nbytes))
		buf = ERR_PTR(-EINVAL);
	else
		buf = hnpu_export(region, arg.offset, arg.nbytes);
	slot_unlock(file);
	if (IS_ERR(buf))
		return PTR_ERR(buf);
	fd = hnpu_inject(HNPU_AT_EXPORT_FD) ? -EMFILE : get_unused_fd_flags(O_CLOEXEC);
	ret = fd < 0 ? fd : 0;
	if (ret)
		goto put;
	arg.fd = fd;
	if (copy_to_user(user, &arg, sizeof(arg))) {
		put_unused_fd(fd);
		ret = -EFAULT;
		goto put;
	}
	fd_install(fd, buf->file);
	return 0;
put:
	dma_buf_put(buf);
	return ret;
}

static long hnpu_ioctl(struct file *filp, unsigned int cmd, unsigned long argument)
{
	void __user *user = (void __user *)argument;
	struct hnpu_file *file = filp->private_data;
	union {
		struct hawk_npu_info info;
		struct hawk_npu_channel channel;
		struct hawk_npu_range range;
		struct hawk_npu_checksum checksum;
	} arg = {};
	int ret;

	if (cmd == HAWK_NPU_EXPORT)
		return do_export(file, user);
	if (cmd == HAWK_NPU_ADOPT)
		return do_adopt(file, user);
	/*
	 * The number holds the size of its structure: one that is not ours is refused below,
	 * unread.
	 */
	if (_IOC_TYPE(cmd) != HAWK_NPU_IOC_MAGIC || _IOC_SIZE(cmd) > sizeof(arg))
		return -ENOTTY;
	if ((_IOC_DIR(cmd) & _IOC_WRITE) && copy_from_user(&arg, user, _IOC_SIZE(cmd)))
		return -EFAULT;
	switch (cmd) {
	case HAWK_NPU_INFO:
		ret = do_info(file, &arg.info);
		break;
	case HAWK_NPU_CLAIM:
		ret = do_claim(file, &arg.channel);
		break;
	case HAWK_NPU_REVOKE:
	case HAWK_NPU_RESET:
	case HAWK_NPU_FLUSH:
	case HAWK_NPU_CHECKSUM:
		ret = do_on_region(file, cmd, &arg.range, &arg.checksum.value);
		break;
	default:
		return -ENOTTY;
	}
	if (!ret && (_IOC_DIR(cmd) & _IOC_READ) && copy_to_user(user, &arg, _IOC_SIZE(cmd)))
		ret = -EFAULT;
	return ret;
}

const struct file_operations hnpu_fops = {
	.owner = THIS_MODULE,
	.open = hnpu_open,
	.release = hnpu_release,
	.unlocked_ioctl = hnpu_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = hnpu_mmap,
	.llseek = noop_llseek,
};
