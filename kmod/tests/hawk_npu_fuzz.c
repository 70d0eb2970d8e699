// SPDX-License-Identifier: GPL-2.0
/*
 * Calls a device of hawk_npu at random: hawk_npu_fuzz SEED CALLS EMULATED ADOPTING, the last two device files.
 * Ends with status 1 at an answer that the module never gives; prints how often each answer came.
 *
 * A program of its own, since a hundred thousand calls take an interpreter on an emulated machine for ever.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../hawk_npu.h"

#define PAGE	4096ULL
#define FILES	3
#define KEEP	40

static const unsigned long requests[] = {
	HAWK_NPU_INFO, HAWK_NPU_CLAIM, HAWK_NPU_EXPORT, HAWK_NPU_REVOKE,
	HAWK_NPU_RESET, HAWK_NPU_FLUSH, HAWK_NPU_CHECKSUM, HAWK_NPU_ADOPT,
};

static const int expected[] = {
	0, EACCES, EBADF, EBUSY, EFAULT, EINVAL, ENODEV, ENOMEM, ENOTTY, EOPNOTSUPP, ENOSPC,
};

static uint64_t state;
static int files[FILES], exports[KEEP];
static struct { void *at; size_t n; } maps[KEEP];
static unsigned long answers[4096];
static uint64_t channel_bytes;

/* splitmix64 */
static uint64_t roll(void)
{
	uint64_t z = state += 0x9e3779b97f4a7c15ULL;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
	return z ^ (z >> 31);
}

static int one_in(unsigned int n)
{
	return roll() % n == 0;
}

/* Numbers near the edges of something, and any at all. */
static uint64_t odd(void)
{
	const uint64_t some[] = {
		0, 1, 4, PAGE, 2 * PAGE, channel_bytes - PAGE, channel_bytes, channel_bytes + PAGE,
		1ULL << 40, 1ULL << 63, -PAGE, -1ULL,
	};

	return one_in(6) ? roll() : some[roll() % (sizeof(some) / sizeof(*some))];
}

static void anew(char **paths)
{
	int i;

	for (i = 0; i < KEEP; i++) {
		if (maps[i].at)
			munmap(maps[i].at, maps[i].n);
		maps[i].at = NULL;
		if (exports[i] >= 0)
			close(exports[i]);
		exports[i] = -1;
	}
	for (i = 0; i < FILES; i++) {
		if (files[i] >= 0)
			close(files[i]);
		files[i] = open(paths[i && one_in(2)], O_RDWR);
		if (files[i] < 0) {
			perror("open");
			exit(2);
		}
	}
}

static int try_map(int fd)
{
	const uint64_t channels[] = { 0, 1, 3, 4, 63, 64, 1 << 20 };
	uint64_t at = channels[roll() % 7] << HAWK_NPU_MAP_SHIFT;
	int i = roll() % KEEP, flags = one_in(4) ? MAP_PRIVATE : MAP_SHARED;
	size_t n = (1 + roll() % 17) * PAGE;
	void *made;

	if (maps[i].at)
		munmap(maps[i].at, maps[i].n);
	maps[i].at = NULL;
	if (one_in(2))
		fd = exports[roll() % KEEP];
	else
		at += odd() & 0xfffffff000ULL;
	made = mmap(NULL, n, PROT_READ | PROT_WRITE, flags, fd, fd < 0 ? 0 : at);
	if (made == MAP_FAILED)
		return errno;
	maps[i].at = made;
	maps[i].n = n;
	return 0;
}

static int try_ioctl(int fd)
{
	unsigned long request = requests[roll() % (sizeof(requests) / sizeof(*requests))];
	uint64_t words[8];
	void *argument = words;
	int i;

	if (one_in(10))
		request ^= 1UL << roll() % 32;
	for (i = 0; i < 8; i++)
		words[i] = odd();
	/* Channel and flags, or a descriptor: mostly ones that are there. */
	words[0] = one_in(10) ? roll() : roll() % 6;
	if (request == HAWK_NPU_ADOPT && !one_in(4))
		words[0] = (uint32_t)exports[roll() % KEEP];
	if (request == HAWK_NPU_EXPORT && !one_in(4))
		words[3] = 0;
	if (one_in(40))
		argument = (void *)(uintptr_t)(one_in(2) ? 0 : roll() | 1ULL << 47);
	if (ioctl(fd, request, argument) < 0)
		return errno;
	if (request == HAWK_NPU_EXPORT) {
		struct hawk_npu_export made;

		memcpy(&made, words, sizeof(made));
		i = roll() % KEEP;
		if (exports[i] >= 0)
			close(exports[i]);
		exports[i] = made.fd;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct hawk_npu_info info;
	unsigned long i, calls;
	size_t e;

	if (argc != 5) {
		fprintf(stderr, "%s SEED CALLS EMULATED ADOPTING\n", argv[0]);
		return 2;
	}
	state = strtoull(argv[1], NULL, 0);
	calls = strtoul(argv[2], NULL, 0);
	memset(files, -1, sizeof(files));
	memset(exports, -1, sizeof(exports));
	for (i = 0; i < calls; i++) {
		int code, fd;

		if (i % 2000 == 0)
			anew(argv + 3);
		if (!i) {
			if (ioctl(files[0], HAWK_NPU_INFO, &info) < 0) {
				perror("HAWK_NPU_INFO");
				return 2;
			}
			channel_bytes = info.channel_bytes;
		}
		fd = files[roll() % FILES];
		code = one_in(15) ? try_map(fd) : try_ioctl(fd);
		answers[code < 4096 ? code : 4095]++;
		for (e = 0; e < sizeof(expected) / sizeof(*expected); e++)
			if (expected[e] == code)
				break;
		if (e == sizeof(expected) / sizeof(*expected)) {
			printf("call %lu: %s\n", i, strerror(code));
			return 1;
		}
	}
	for (e = 0; e < 4096; e++)
		if (answers[e])
			printf("%s: %lu\n", e ? strerror(e) : "done", answers[e]);
	return 0;
}
