// SPDX-License-Identifier: GPL-2.0
/*
 * Counts of what there is now, and of what has happened: debugfs, hawk_npu/counts and
 * hawk_npu/events.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "hawk_npu_internal.h"

static const char * const count_names[HNPU_COUNTS] = {
	[HNPU_OPENS] = "opens",
	[HNPU_REGIONS] = "regions",
	[HNPU_PAGES] = "pages",
	[HNPU_PAGES_KEPT] = "pages_kept",
	[HNPU_VMAS] = "vmas",
	[HNPU_EXPORTS] = "exports",
	[HNPU_ATTACHMENTS] = "attachments",
	[HNPU_PINS] = "pins",
	[HNPU_MAPPINGS] = "mappings",
	[HNPU_PEERS] = "peers",
	[HNPU_PEER_PINS] = "peer_pins",
	[HNPU_ADOPTED] = "adopted",
};

static const char * const event_names[HNPU_EVENTS] = {
	[HNPU_REVOCATIONS] = "revocations",
	[HNPU_INVALIDATIONS] = "invalidations",
	[HNPU_INJECTED] = "injected",
};

static atomic_long_t counts[HNPU_COUNTS];
static atomic_long_t events[HNPU_EVENTS];
static struct dentry *folder;

void hnpu_add(enum hnpu_count what, long n)
{
	atomic_long_add(n, &counts[what]);
}

void hnpu_happened(enum hnpu_event what)
{
	atomic_long_inc(&events[what]);
}

static int counts_show(struct seq_file *s, void *unused)
{
	int i;

	for (i = 0; i < HNPU_COUNTS; i++)
		seq_printf(s, "%s %ld\n", count_names[i], atomic_long_read(&counts[i]));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counts);

static int events_show(struct seq_file *s, void *unused)
{
	int i;

	for (i = 0; i < HNPU_EVENTS; i++)
		seq_printf(s, "%s %ld\n", event_names[i], atomic_long_read(&events[i]));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(events);

void hnpu_stats_init(void)
{
	folder = debugfs_create_dir("hawk_npu", NULL);
	debugfs_create_file("counts", 0444, folder, NULL, &counts_fops);
	debugfs_create_file("events", 0444, folder, NULL, &events_fops);
}

void hnpu_stats_exit(void)
{
	int i;

	debugfs_remove_recursive(folder);
	for (i = 0; i < HNPU_COUNTS; i++)
		if (atomic_long_read(&counts[i]))
			pr_warn("%ld %s left\n", atomic_long_read(&counts[i]), count_names[i]);
}
