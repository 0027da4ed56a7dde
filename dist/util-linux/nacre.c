/*
 * nacre.c - devices of nacre's pools, for libblkid (libblkid/src/superblocks)
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The format is described in docs/pool-format.md of nacre ("Labels"). A device has four labels of 512 KiB, two at
 * each end. The identity block lies 64 KiB behind the beginning of a label: its magic, 16 bytes of checksum (XXH3
 * with 128 bits, which libblkid has not), then the fields that are read here.
 */
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "superblocks.h"

#define NACRE_MAGIC		"nacrePOO"
#define NACRE_VERSION		1
#define NACRE_BLOCK		(32 * 1024)	/* bytes of an identity block */
#define NACRE_FIELDS		24		/* the fields begin behind magic and checksum */
#define NACRE_DESTROYED		3
#define NACRE_NAME_MAX		255
#define NACRE_MINIMUM		(64 * 1024 * 1024)
#define NACRE_FIRST		64		/* where the blocks of the first two labels lie, KiB */
#define NACRE_SECOND		(512 + 64)

/* What is left of the block. A read behind its end sets 'bad' and gives zeros. */
struct nacre_fields {
	const unsigned char *at;
	size_t left;
	int bad;
};

static const unsigned char *nacre_bytes(struct nacre_fields *f, size_t count)
{
	const unsigned char *found = f->at;

	if (f->bad || count > f->left) {
		f->bad = 1;
		return NULL;
	}
	f->at += count;
	f->left -= count;
	return found;
}

/* A little-endian number of 'count' bytes. */
static uint64_t nacre_number(struct nacre_fields *f, size_t count)
{
	const unsigned char *bytes = nacre_bytes(f, count);
	uint64_t number = 0;

	while (bytes && count--)
		number = number << 8 | bytes[count];
	return number;
}

/* Bytes behind their length, which is LEB128. */
static const unsigned char *nacre_string(struct nacre_fields *f, size_t *length)
{
	uint64_t count = 0;
	unsigned int shift = 0;
	uint64_t byte;

	do {
		byte = nacre_number(f, 1);
		count |= (byte & 0x7f) << shift;
		shift += 7;
	} while ((byte & 0x80) && shift < 28);
	if (byte & 0x80)
		f->bad = 1;
	*length = count;
	return nacre_bytes(f, count);
}

/* What the identity block of a label says. */
struct nacre_identity {
	const unsigned char *name;
	size_t name_length;
	uint64_t version, pool, member;
};

/* Reads the identity block at 'kboff' KiB: BLKID_PROBE_OK, BLKID_PROBE_NONE or a negative error number. */
static int nacre_identity(blkid_probe pr, uint64_t kboff, struct nacre_identity *id)
{
	const unsigned char *block, *skipped;
	struct nacre_fields f = { .bad = 0 };
	uint64_t state, slot, index, count;
	size_t length;

	block = blkid_probe_get_buffer(pr, kboff << 10, NACRE_BLOCK);
	if (!block)
		return errno ? -errno : BLKID_PROBE_NONE;
	if (memcmp(block, NACRE_MAGIC, 8) != 0)
		return BLKID_PROBE_NONE;
	f.at = block + NACRE_FIELDS;
	f.left = NACRE_BLOCK - NACRE_FIELDS;

	id->version = nacre_number(&f, 4);
	nacre_bytes(&f, 4 * 8);			/* revision, three words of features */
	id->pool = nacre_number(&f, 8);
	id->name = nacre_string(&f, &id->name_length);
	state = nacre_number(&f, 1);
	nacre_bytes(&f, 8);			/* the machine: number and name */
	nacre_string(&f, &length);
	nacre_bytes(&f, 8);			/* time */
	slot = nacre_number(&f, 8);
	index = nacre_number(&f, 2);
	count = nacre_number(&f, 2);

	if (f.bad || id->version != NACRE_VERSION || !id->name_length || id->name_length > NACRE_NAME_MAX ||
	    !state || state >= NACRE_DESTROYED || !slot || (slot & (slot - 1)) || index >= count)
		return BLKID_PROBE_NONE;

	/* Number, length and path of each device, up to this one. */
	for (; index; index--) {
		nacre_bytes(&f, 16);
		nacre_string(&f, &length);
	}
	id->member = nacre_number(&f, 8);
	skipped = nacre_bytes(&f, 8);
	return f.bad || !skipped ? BLKID_PROBE_NONE : BLKID_PROBE_OK;
}

static int probe_nacre(blkid_probe pr, const struct blkid_idmag *mag)
{
	struct nacre_identity id = { .name = NULL };
	int rc = nacre_identity(pr, (uint64_t) mag->kboff, &id);

	/* libblkid looks for no further magic where one was found: a damaged first label must not hide the second. */
	if (rc != BLKID_PROBE_OK && mag->kboff == NACRE_FIRST)
		rc = nacre_identity(pr, NACRE_SECOND, &id);
	if (rc != BLKID_PROBE_OK)
		return rc;

	blkid_probe_sprintf_version(pr, "%" PRIu64, id.version);
	blkid_probe_set_label(pr, id.name, id.name_length);
	blkid_probe_sprintf_uuid(pr, (unsigned char *) &id.pool, sizeof(id.pool), "%" PRIu64, id.pool);
	blkid_probe_sprintf_value(pr, "UUID_SUB", "%" PRIu64, id.member);
	return BLKID_PROBE_OK;
}

const struct blkid_idinfo nacre_idinfo =
{
	.name		= "nacre_member",
	.usage		= BLKID_USAGE_RAID,
	.probefunc	= probe_nacre,
	.minsz		= NACRE_MINIMUM,
	.magics		=
	{
		{ .magic = NACRE_MAGIC, .len = 8, .kboff = NACRE_FIRST },
		{ .magic = NACRE_MAGIC, .len = 8, .kboff = NACRE_SECOND },
		{ NULL }
	}
};
