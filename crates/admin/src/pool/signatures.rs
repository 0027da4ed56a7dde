//! File systems, volumes, partition tables and pools that a device holds, recognized by their signatures (the numbers that
//! blkid(8) and wipefs(8) look for).
//!
//! Called by [`super::devices`] before a device becomes part of a pool. Invariant: a signature that is found is refused for
//! every [`Accepted`] but [`Accepted::Anything`], and so is a device that cannot be read where a signature may lie.

use nacre_pool::device::Device;
use nacre_pool::label::{self, PoolState};
use std::io;

/// The part at the beginning and at the end of a file that has to be zero in an empty one, bytes.
const ENDS: u64 = 1 << 20;
/// The length of ZFS' labels, two at either end of a device, and the offset of the uberblocks in each, bytes.
const ZFS_LABEL: u64 = 256 << 10;
const ZFS_UBERBLOCKS: u64 = 128 << 10;
const ZFS_UBERBLOCK: u64 = 0x00ba_b10c;
/// The magic number of the checksum behind a label's configuration, which spares and caches have as well, and its offset.
const ZFS_CHECKSUM: u64 = 0x0210_da7a_b10c_7a11;
const ZFS_CHECKSUM_AT: u64 = 0x1_ffd8;
/// Magic number of Linux' software RAID, as it lies on the device.
const MD_MAGIC: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];

/// Which content a device may have that becomes part of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// None: a file is zero at both ends, a device has no signature.
    Empty,
    /// Content without a signature, as `zpool create` accepts it.
    Unrecognized,
    /// Any (`-f`).
    Anything,
}

impl Accepted {
    /// Any content with `-f`, otherwise none.
    #[must_use]
    pub fn forced(force: bool) -> Self {
        if force { Self::Anything } else { Self::Empty }
    }

    /// Content that `create` accepts: as `zpool`, also content without a signature.
    #[must_use]
    pub fn at_creation(force: bool, is_zpool: bool) -> Self {
        match Self::forced(force) {
            Self::Empty if is_zpool => Self::Unrecognized,
            other => other,
        }
    }
}

/// The content of a device that is not `accepted`, in words that follow "it". `is_file`: the device is a regular file.
pub(super) fn refused(device: &dyn Device, is_file: bool, accepted: Accepted) -> Option<String> {
    if accepted == Accepted::Anything {
        return None;
    }
    let mut was_pool = false;
    match label::probe(device) {
        Ok(Some(identity)) if identity.state == PoolState::Destroyed => was_pool = true,
        Ok(Some(identity)) => {
            let state = if identity.state == PoolState::Exported { "exported" } else { "potentially active" };
            return Some(format!("is part of {state} pool '{}'", identity.name));
        }
        Ok(None) => {}
        Err(_) => return Some("has the label of a pool that this program cannot read".to_owned()),
    }
    match signature(device) {
        Ok(Some(kind)) => return Some(format!("contains {kind}")),
        Ok(None) => {}
        Err(error) => return Some(format!("cannot be read everywhere that a signature may lie: {error}")),
    }
    let is_used = accepted == Accepted::Empty && is_file && !was_pool && !is_zero(device);
    is_used.then(|| "is not empty".to_owned())
}

/// Whether both ends of a file are zeros.
fn is_zero(device: &dyn Device) -> bool {
    let length = device.length();
    [0, length.saturating_sub(ENDS)].into_iter().all(|offset| {
        let mut buffer = vec![0; ENDS.min(length - offset) as usize];
        // Content that cannot be read may not be zero.
        device.read_at(&mut buffer, offset).is_ok() && buffer.iter().all(|byte| *byte == 0)
    })
}

/// Signatures by their offset in bytes.
const KNOWN: [(u64, &[u8], &str); 73] = [
    (0x438, &[0x53, 0xef], "a filesystem of type 'ext4' (or ext2, ext3)"),
    (0, b"XFSB", "a filesystem of type 'xfs'"),
    (0x10040, b"_BHRfS_M", "a filesystem of type 'btrfs'"),
    (0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "a cache (bcache)"),
    (0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", "a filesystem of type 'bcachefs'"),
    (0x400, &[0x10, 0x20, 0xf5, 0xf2], "a filesystem of type 'f2fs'"),
    (0x36, b"FAT", "a filesystem of type 'vfat'"),
    (0x52, b"FAT32", "a filesystem of type 'vfat'"),
    (0x36, b"MSDOS", "a filesystem of type 'vfat'"),
    (0x52, b"MSWIN", "a filesystem of type 'vfat'"),
    (3, b"NTFS    ", "a filesystem of type 'ntfs'"),
    (3, b"EXFAT   ", "a filesystem of type 'exfat'"),
    (3, b"-FVE-FS-", "an encrypted volume (BitLocker)"),
    (0x8001, b"CD001", "a filesystem of type 'iso9660'"),
    (0x8001, b"BEA01", "a filesystem of type 'udf'"),
    (0x8001, b"NSR02", "a filesystem of type 'udf'"),
    (0x8001, b"NSR03", "a filesystem of type 'udf'"),
    (0x8000, b"JFS1", "a filesystem of type 'jfs'"),
    (0x10034, b"ReIsErFs", "a filesystem of type 'reiserfs'"),
    (0x10034, b"ReIsEr2Fs", "a filesystem of type 'reiserfs'"),
    (0x10034, b"ReIsEr3Fs", "a filesystem of type 'reiserfs'"),
    (0x2034, b"ReIsErFs", "a filesystem of type 'reiserfs'"),
    (0x10000, b"ReIsEr4", "a filesystem of type 'reiser4'"),
    (0x10000, &[0x01, 0x16, 0x19, 0x70], "a filesystem of type 'gfs2'"),
    (0x406, &[0x34, 0x34], "a filesystem of type 'nilfs2'"),
    (0x400, b"OCFSV2", "a filesystem of type 'ocfs2'"),
    (0x800, b"OCFSV2", "a filesystem of type 'ocfs2'"),
    (0x1000, b"OCFSV2", "a filesystem of type 'ocfs2'"),
    (0x2000, b"OCFSV2", "a filesystem of type 'ocfs2'"),
    (0x400, b"H+", "a filesystem of type 'hfsplus'"),
    (0x400, b"HX", "a filesystem of type 'hfsplus'"),
    (0x400, b"BD", "a filesystem of type 'hfs'"),
    (0x20, b"NXSB", "a filesystem of type 'apfs'"),
    (0x255c, &[0x54, 0x19, 0x01, 0x00], "a filesystem of type 'ufs'"),
    (0x255c, &[0x19, 0x01, 0x54, 0x19], "a filesystem of type 'ufs'"),
    (0x1055c, &[0x19, 0x01, 0x54, 0x19], "a filesystem of type 'ufs'"),
    (0, b"hsqs", "a filesystem of type 'squashfs'"),
    (0x400, &[0xe2, 0xe1, 0xf5, 0xe0], "a filesystem of type 'erofs'"),
    (0, &[0x45, 0x3d, 0xcd, 0x28], "a filesystem of type 'cramfs'"),
    (0, b"-rom1fs-", "a filesystem of type 'romfs'"),
    (0x20_0000, &[0x5e, 0xf1, 0xab, 0x2f], "a filesystem of type 'VMFS'"),
    (0x10_0000, &[0x0d, 0xd0, 0x01, 0xc0], "a volume of VMFS"),
    (0xff6, b"SWAPSPACE2", "swap space"),
    (0xff6, b"SWAP-SPACE", "swap space"),
    (0xff6, b"S1SUSPEND", "swap space"),
    (0x1ff6, b"SWAPSPACE2", "swap space"),
    (0x3ff6, b"SWAPSPACE2", "swap space"),
    (0xfff6, b"SWAPSPACE2", "swap space"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (0x4000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x8000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x1_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x2_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x4_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x8_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x10_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x20_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x40_0000, b"SKUL\xba\xbe", "an encrypted volume (LUKS)"),
    (0x018, b"LVM2 001", "a physical volume of LVM"),
    (0x218, b"LVM2 001", "a physical volume of LVM"),
    (0x418, b"LVM2 001", "a physical volume of LVM"),
    (0x618, b"LVM2 001", "a physical volume of LVM"),
    (0, b"bluestore block device", "a device of Ceph"),
    (32, b"ORCLDISK", "a disk of Oracle ASM"),
    (0, b"QFI\xfb", "the image of a virtual disk (qcow2)"),
    (0, b"KDMV", "the image of a virtual disk (VMDK)"),
    (0, b"vhdxfile", "the image of a virtual disk (VHDX)"),
    (0, b"conectix", "the image of a virtual disk (VHD)"),
    (0x204, b"!Stra0tis\x86\xff\x02^\x41rh", "a device of Stratis"),
    (0x1000, &MD_MAGIC, "a part of a software RAID"),
    (0, &MD_MAGIC, "a part of a software RAID"),
    (0x200, b"EFI PART", "a partition table"),
    (0x1000, b"EFI PART", "a partition table"),
];

/// The file system, swap area, volume or partition table of a device.
fn signature(device: &dyn Device) -> io::Result<Option<&'static str>> {
    for (offset, magic, kind) in KNOWN {
        if has_magic_at(device, offset, magic)? {
            return Ok(Some(kind));
        }
    }
    if is_of_raid(device)? {
        return Ok(Some("a part of a software RAID"));
    }
    if is_of_zfs(device)? {
        return Ok(Some("a filesystem of type 'zfs_member'"));
    }
    Ok(has_partitions(device)?.then_some("a partition table"))
}

fn has_magic_at(device: &dyn Device, offset: u64, magic: &[u8]) -> io::Result<bool> {
    let is_inside = offset.checked_add(magic.len() as u64).is_some_and(|end| end <= device.length());
    if !is_inside {
        return Ok(false);
    }
    let mut there = vec![0; magic.len()];
    device.read_at(&mut there, offset)?;
    Ok(there == magic)
}

/// Whether a superblock of Linux' software RAID lies at the end (versions 0.90 and 1.0).
fn is_of_raid(device: &dyn Device) -> io::Result<bool> {
    let length = device.length();
    let early = (length & !0xffff).checked_sub(0x10000);
    let late = length.checked_sub(0x2000).map(|offset| offset & !0xfff);
    for offset in [early, late].into_iter().flatten() {
        if has_magic_at(device, offset, &MD_MAGIC)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether one of the four labels of ZFS has a configuration or an uberblock, in either byte order. Uberblocks are 1 KiB to
/// 8 KiB long.
fn is_of_zfs(device: &dyn Device) -> io::Result<bool> {
    let end = device.length() & !(ZFS_LABEL - 1);
    if end < 4 * ZFS_LABEL {
        return Ok(false);
    }
    for label in [0, ZFS_LABEL, end - 2 * ZFS_LABEL, end - ZFS_LABEL] {
        for magic in [ZFS_CHECKSUM.to_le_bytes(), ZFS_CHECKSUM.to_be_bytes()] {
            if has_magic_at(device, label + ZFS_CHECKSUM_AT, &magic)? {
                return Ok(true);
            }
        }
        let mut ring = vec![0; ZFS_UBERBLOCKS as usize];
        device.read_at(&mut ring, label + ZFS_UBERBLOCKS)?;
        let magics = [ZFS_UBERBLOCK.to_le_bytes(), ZFS_UBERBLOCK.to_be_bytes()];
        if ring.chunks(1 << 10).any(|block| magics.iter().any(|magic| block.starts_with(magic))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the first sector is a partition table (MBR) with a partition: each entry has a valid boot flag, and one a type and
/// a length.
fn has_partitions(device: &dyn Device) -> io::Result<bool> {
    let mut sector = [0; 512];
    device.read_at(&mut sector, 0)?;
    let (Some(entries), Some(end)) = (sector.get(446..510), sector.get(510..)) else { return Ok(false) };
    let is_valid = |entry: &[u8]| matches!(entry.first(), Some(0 | 0x80));
    let is_used = |entry: &[u8]| {
        let has_type = entry.get(4).is_some_and(|kind| *kind != 0);
        has_type && entry.get(12..16).is_some_and(|length| length.iter().any(|byte| *byte != 0))
    };
    Ok(end == [0x55, 0xaa] && entries.chunks(16).all(is_valid) && entries.chunks(16).any(is_used))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_pool::device::FileDevice;
    use std::fs;
    use std::os::unix::fs::FileExt;

    const LENGTH: u64 = 64 << 20;

    /// The refusal for a file that is zero but for these bytes.
    fn refusal(accepted: Accepted, content: &[(u64, &[u8])]) -> Option<String> {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("d");
        let file = fs::File::create(&path).unwrap();
        file.set_len(LENGTH).unwrap();
        for (offset, bytes) in content {
            file.write_all_at(bytes, *offset).unwrap();
        }
        refused(&FileDevice::open(&path, true).unwrap(), true, accepted)
    }

    #[test]
    fn every_signature_is_refused_unless_it_is_forced() {
        let mbr = [&[0x80, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0][..], &[0; 48], &[0x55, 0xaa]].concat();
        let magic = ZFS_UBERBLOCK.to_le_bytes();
        let checksum = ZFS_CHECKSUM.to_le_bytes();
        let others: [(u64, &[u8]); 7] = [
            (ZFS_CHECKSUM_AT, &checksum),
            (LENGTH - ZFS_LABEL + ZFS_CHECKSUM_AT, &checksum),
            (446, &mbr),
            ((256 << 10) + (128 << 10) + 3 * 1024, &magic),
            (128 << 10, &ZFS_UBERBLOCK.to_be_bytes()),
            (LENGTH - 0x10000, &MD_MAGIC),
            (LENGTH - 0x2000, &MD_MAGIC),
        ];
        let known = KNOWN.iter().map(|(offset, number, _)| (*offset, *number));
        for one in known.chain(others) {
            for accepted in [Accepted::Empty, Accepted::Unrecognized] {
                let said = refusal(accepted, &[one]);
                assert!(said.as_ref().is_some_and(|said| said.starts_with("contains ")), "{one:x?}: {said:?}");
            }
            assert_eq!(refusal(Accepted::Anything, &[one]), None);
        }
    }

    /// A device that cannot be read from an offset on.
    struct Unreadable(FileDevice, u64);

    impl Device for Unreadable {
        fn name(&self) -> &str {
            self.0.name()
        }

        fn length(&self) -> u64 {
            self.0.length()
        }

        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            match offset.checked_add(buffer.len() as u64) {
                Some(end) if end <= self.1 => self.0.read_at(buffer, offset),
                _ => Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())),
            }
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            self.0.write_at(bytes, offset)
        }

        fn sync(&self) -> io::Result<()> {
            self.0.sync()
        }

        fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
            self.0.discard(offset, length)
        }

        fn expect(&self, offset: u64, length: u64) {
            self.0.expect(offset, length);
        }
    }

    #[test]
    fn a_device_that_cannot_be_read_where_a_signature_may_lie_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("d");
        fs::File::create(&path).unwrap().set_len(LENGTH).unwrap();
        for readable in [2 << 20, LENGTH - ZFS_LABEL] {
            let device = Unreadable(FileDevice::open(&path, true).unwrap(), readable);
            for accepted in [Accepted::Empty, Accepted::Unrecognized] {
                let said = refused(&device, false, accepted);
                assert!(said.as_ref().is_some_and(|said| said.contains("cannot be read everywhere")), "{said:?}");
            }
            assert_eq!(refused(&device, false, Accepted::Anything), None);
        }
    }

    #[test]
    fn other_content_is_refused_where_the_file_has_to_be_empty() {
        // Also content that resembles a partition table, as in the boot sector of a program.
        let almost: [&[(u64, &[u8])]; 3] =
            [&[(0, b"hello\n")], &[(510, &[0x55, 0xaa])], &[(446, &[7; 64]), (510, &[0x55, 0xaa])]];
        for content in almost {
            assert_eq!(refusal(Accepted::Unrecognized, content), None, "{content:?}");
            assert_eq!(refusal(Accepted::Empty, content).as_deref(), Some("is not empty"), "{content:?}");
        }
        assert_eq!(refusal(Accepted::Empty, &[]), None);
    }
}
