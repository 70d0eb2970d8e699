// SPDX-License-Identifier: GPL-2.0
/*
 * The core's side of the peer-memory interface: one client, whose callbacks user space drives in
 * the orders that vendors' stacks have.
 */
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/xarray.h>
#include <rdma/peer_mem.h>

#include "dma_copy.h"
#include "hawk_npu_peer_core.h"

#define COPY_MAX	(4UL << 20)

struct registered {
	struct kref ref;
	struct mutex lock;
	struct file *owner;
	struct device *dev;
	void *context;
	struct sg_table sgt;
	u64 lead;		/* bytes of the first page before addr */
	bool live;		/* between get_pages and release */
	bool invalidated;
};

static DEFINE_MUTEX(clients_lock);
static const struct peer_memory_client *client;	/* under clients_lock */
static DEFINE_XARRAY_ALLOC1(all);
static struct platform_device *own;

static void reg_free(struct kref *ref)
{
	struct registered *reg = container_of(ref, struct registered, ref);

	put_device(reg->dev);
	kfree(reg);
}

static struct registered *reg_get(u32 id)
{
	struct registered *reg;

	xa_lock(&all);
	reg = xa_load(&all, id);
	if (reg)
		kref_get(&reg->ref);
	xa_unlock(&all);
	return reg;
}

/*
 * As the core does: by a ticket that may be over by now, undoing the registration inside the call.
 */
static int core_invalidate(void *handle, u64 ticket)
{
	struct registered *reg = reg_get(ticket);

	if (!reg)
		return 0;
	mutex_lock(&reg->lock);
	if (reg->live && !reg->invalidated) {
		reg->invalidated = true;
		client->dma_unmap(&reg->sgt, reg->context, reg->dev);
		client->put_pages(&reg->sgt, reg->context);
	}
	mutex_unlock(&reg->lock);
	kref_put(&reg->ref, reg_free);
	return 0;
}

void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback)
{
	void *handle = NULL;

	mutex_lock(&clients_lock);
	if (!client) {
		client = peer_client;
		if (invalidate_callback)
			*invalidate_callback = core_invalidate;
		handle = &client;
	}
	mutex_unlock(&clients_lock);
	return handle;
}
EXPORT_SYMBOL(ib_register_peer_memory_client);

void ib_unregister_peer_memory_client(void *handle)
{
	mutex_lock(&clients_lock);
	WARN_ON(!xa_empty(&all));
	client = NULL;
	mutex_unlock(&clients_lock);
}
EXPORT_SYMBOL(ib_unregister_peer_memory_client);

/*
 * reg->lock is held throughout, so that an invalidation that comes at once waits for the
 * registration to stand.
 */
static int steps(struct registered *reg, struct peer_core_register *arg, u64 ticket)
{
	u64 whole = PAGE_ALIGN(arg->addr + arg->nbytes) - (arg->addr & PAGE_MASK);
	int nmap = 0, ret;

	arg->failed = PEER_CORE_ACQUIRE;
	ret = client->acquire(arg->addr, arg->nbytes, NULL, NULL, &reg->context);
	if (ret != 1)
		return ret < 0 ? ret : -ENOENT;
	arg->failed = PEER_CORE_GET_PAGES;
	ret = client->get_pages(arg->addr, arg->nbytes, 1, 0, NULL, reg->context, ticket);
	if (ret)
		goto release;
	arg->failed = PEER_CORE_DMA_MAP;
	ret = client->dma_map(&reg->sgt, reg->context, reg->dev, 0, &nmap);
	arg->page_bytes = client->get_page_size(reg->context);
	if (ret)
		goto put;
	arg->failed = 0;
	arg->entries = nmap;
	arg->faults = dma_faults(&reg->sgt, whole);
	reg->live = true;
	return 0;
put:
	client->put_pages(&reg->sgt, reg->context);
release:
	client->release(reg->context);
	return ret;
}

static int do_register(struct file *filp, struct peer_core_register *arg)
{
	struct registered *reg = kzalloc(sizeof(*reg), GFP_KERNEL);
	int ret;

	if (!reg)
		return -ENOMEM;
	kref_init(&reg->ref);
	mutex_init(&reg->lock);
	reg->owner = filp;
	reg->lead = offset_in_page(arg->addr);
	reg->dev = dma_device_of(arg->device, own);
	if (!reg->dev) {
		kfree(reg);
		return -ENXIO;
	}
	mutex_lock(&reg->lock);
	ret = xa_alloc(&all, &arg->id, reg, xa_limit_31b, GFP_KERNEL);
	if (!ret) {
		ret = client ? steps(reg, arg, arg->id) : -ENODEV;
		if (ret)
			xa_erase(&all, arg->id);
	}
	mutex_unlock(&reg->lock);
	if (ret)
		kref_put(&reg->ref, reg_free);
	return ret;
}

static void undo(struct registered *reg, u32 order)
{
	mutex_lock(&reg->lock);
	if (reg->live && order != PEER_CORE_RELEASE_ONLY && (!reg->invalidated || order == PEER_CORE_TWICE)) {
		if (order == PEER_CORE_PUT_UNMAP)
			client->put_pages(&reg->sgt, reg->context);
		client->dma_unmap(&reg->sgt, reg->context, reg->dev);
		if (order != PEER_CORE_PUT_UNMAP)
			client->put_pages(&reg->sgt, reg->context);
	}
	if (reg->live)
		client->release(reg->context);
	reg->live = false;
	mutex_unlock(&reg->lock);
}

static int do_deregister(struct file *filp, const struct peer_core_deregister *arg)
{
	struct registered *reg;

	xa_lock(&all);
	reg = xa_load(&all, arg->id);
	if (reg && reg->owner == filp)
		__xa_erase(&all, arg->id);
	else
		reg = NULL;
	xa_unlock(&all);
	if (!reg)
		return -ENOENT;
	undo(reg, arg->order);
	kref_put(&reg->ref, reg_free);
	return 0;
}

static int do_copy(const struct peer_core_copy *arg)
{
	void __user *user = u64_to_user_ptr(arg->user);
	struct registered *reg;
	void *bytes;
	int ret;

	if (!arg->nbytes || arg->nbytes > COPY_MAX)
		return -EINVAL;
	bytes = kvzalloc(arg->nbytes, GFP_KERNEL);
	if (!bytes)
		return -ENOMEM;
	ret = -EFAULT;
	if (arg->write && copy_from_user(bytes, user, arg->nbytes))
		goto free;
	ret = -ENOENT;
	reg = reg_get(arg->id);
	if (!reg)
		goto free;
	mutex_lock(&reg->lock);
	ret = -ENODEV;
	if (reg->live && !reg->invalidated)
		ret = dma_copy(&reg->sgt, reg->lead + arg->offset, bytes, arg->nbytes, arg->write);
	mutex_unlock(&reg->lock);
	kref_put(&reg->ref, reg_free);
	if (!ret && !arg->write && copy_to_user(user, bytes, arg->nbytes))
		ret = -EFAULT;
free:
	kvfree(bytes);
	return ret;
}

static int do_status(struct peer_core_status *arg)
{
	struct registered *reg;
	unsigned long id;

	arg->invalidated = 0;
	arg->live = 0;
	arg->clients = client != NULL;
	xa_for_each(&all, id, reg)
		arg->live++;
	reg = reg_get(arg->id);
	if (!reg)
		return 0;
	mutex_lock(&reg->lock);
	arg->invalidated = reg->invalidated;
	mutex_unlock(&reg->lock);
	kref_put(&reg->ref, reg_free);
	return 0;
}

static long core_ioctl(struct file *filp, unsigned int cmd, unsigned long argument)
{
	void __user *user = (void __user *)argument;
	union {
		struct peer_core_register reg;
		struct peer_core_deregister dereg;
		struct peer_core_copy copy;
		struct peer_core_status status;
	} arg = {};
	int ret;

	if (_IOC_TYPE(cmd) != PEER_CORE_MAGIC || _IOC_SIZE(cmd) > sizeof(arg))
		return -ENOTTY;
	if ((_IOC_DIR(cmd) & _IOC_WRITE) && copy_from_user(&arg, user, _IOC_SIZE(cmd)))
		return -EFAULT;
	switch (cmd) {
	case PEER_CORE_REGISTER:
		ret = do_register(filp, &arg.reg);
		break;
	case PEER_CORE_DEREGISTER:
		ret = do_deregister(filp, &arg.dereg);
		break;
	case PEER_CORE_COPY:
		ret = do_copy(&arg.copy);
		break;
	case PEER_CORE_STATUS:
		ret = do_status(&arg.status);
		break;
	default:
		return -ENOTTY;
	}
	/* Which step refused is told with the refusal. */
	if ((!ret || cmd == PEER_CORE_REGISTER) && (_IOC_DIR(cmd) & _IOC_READ) &&
	    copy_to_user(user, &arg, _IOC_SIZE(cmd)))
		ret = -EFAULT;
	return ret;
}

static int core_release(struct inode *inode, struct file *filp)
{
	struct registered *reg;
	unsigned long id;

	xa_for_each(&all, id, reg) {
		if (reg->owner == filp) {
			struct peer_core_deregister arg = { .id = id };

			do_deregister(filp, &arg);
		}
	}
	return 0;
}

static const struct file_operations core_fops = {
	.owner = THIS_MODULE,
	.open = nonseekable_open,
	.release = core_release,
	.unlocked_ioctl = core_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice core_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = KBUILD_MODNAME,
	.fops = &core_fops,
	.mode = 0600,
};

static int __init core_init(void)
{
	return add_devices(&own, &core_misc);
}

static void __exit core_exit(void)
{
	remove_devices(own, &core_misc);
}

module_init(core_init);
module_exit(core_exit);
MODULE_DESCRIPTION("The core's side of the peer-memory interface, for the tests of hawk_npu");
MODULE_LICENSE("GPL");
