// SPDX-License-Identifier: GPL-2.0
/*
 * Failures on demand, for tests.  Writing "STEP" or "STEP:N" to the parameter "inject" makes the
 * next, or the N-th, pass of that step fail, once; "none" takes it back.  Reading it shows what is
 * still to come, then the steps there are.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/atomic.h>
#include <linux/kernel.h>
#include <linux/moduleparam.h>
#include <linux/string.h>

#include "hawk_npu_internal.h"

static const char * const step_names[HNPU_STEPS] = {
	[HNPU_AT_OPEN] = "open",
	[HNPU_AT_REGION] = "region",
	[HNPU_AT_CLAIM] = "claim",
	[HNPU_AT_PAGE] = "page",
	[HNPU_AT_MMAP] = "mmap",
	[HNPU_AT_EXPORT] = "export",
	[HNPU_AT_EXPORT_FD] = "export_fd",
	[HNPU_AT_ATTACH] = "attach",
	[HNPU_AT_PIN] = "pin",
	[HNPU_AT_MAP] = "map",
	[HNPU_AT_MAP_TABLE] = "map_table",
	[HNPU_AT_MAP_DMA] = "map_dma",
	[HNPU_AT_ADOPT] = "adopt",
	[HNPU_AT_ADOPT_ATTACH] = "adopt_attach",
	[HNPU_AT_PEER_ACQUIRE] = "peer_acquire",
	[HNPU_AT_PEER_PIN] = "peer_pin",
	[HNPU_AT_PEER_MAP] = "peer_map",
	[HNPU_AT_PROBE] = "probe",
};

/* How many passes of each step until one fails; 0 for never. */
static atomic_t countdown[HNPU_STEPS];

bool hnpu_inject(enum hnpu_step step)
{
	if (likely(!atomic_read(&countdown[step])) || atomic_dec_if_positive(&countdown[step]))
		return false;
	hnpu_happened(HNPU_INJECTED);
	pr_notice("injected a failure at %s\n", step_names[step]);
	return true;
}

static int inject_set(const char *value, const struct kernel_param *kp)
{
	char text[32], *step, *number;
	u32 n = 1;
	int i;

	if (strscpy(text, value, sizeof(text)) < 0)
		return -EINVAL;
	number = strim(text);
	step = strsep(&number, ":");
	if (number && (kstrtou32(number, 0, &n) || !n || n > INT_MAX))
		return -EINVAL;
	if (!strcmp(step, "none")) {
		for (i = 0; i < HNPU_STEPS; i++)
			atomic_set(&countdown[i], 0);
		return 0;
	}
	i = match_string(step_names, HNPU_STEPS, step);
	if (i < 0)
		return i;
	atomic_set(&countdown[i], n);
	return 0;
}

static int inject_get(char *buffer, const struct kernel_param *kp)
{
	int i, at = 0;

	for (i = 0; i < HNPU_STEPS; i++)
		at += scnprintf(buffer + at, PAGE_SIZE - at, "%s:%d%c", step_names[i],
				atomic_read(&countdown[i]), i + 1 < HNPU_STEPS ? ' ' : '\n');
	return at;
}

static const struct kernel_param_ops inject_ops = { .set = inject_set, .get = inject_get };
module_param_cb(inject, &inject_ops, NULL, 0600);
MODULE_PARM_DESC(inject, "STEP or STEP:N: the N-th pass of that step fails once; none: none does (for tests)");
