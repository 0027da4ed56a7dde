//! The mount table of a mount namespace, from `/proc/self/mountinfo`: mounts at a path, the path of a mount, and
//! whether the path still leads to the mount.
//!
//! Used at mount (to remember which is ours) and at unmount (to find it, wherever its directory has been moved
//! since). Reading the table sends no request to any file system, unlike `stat(2)`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Identity of a mount: two that exist at the same time differ in the id. An id is reused when its mount is gone, but
/// not together with the device of a connection that lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Id of the mount, as in mountinfo and statx(2).
    pub id: u64,
    /// Device of the file system, major and minor.
    pub device: (u32, u32),
}

/// A row of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub identity: Identity,
    /// Id of the parent mount.
    parent: u64,
    /// Its current mount point, absolute and without links.
    pub path: PathBuf,
    /// The peer group whose mounts and unmounts it sends and receives (`shared`).
    shared: Option<u64>,
    /// The peer group whose mounts and unmounts it receives (`master`).
    master: Option<u64>,
}

/// Result of resolving the path of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The path leads to the mount.
    Yes,
    /// It leads to another mount on top of it, at the same path.
    Covered,
    /// It leads into another mount, at this path.
    Hidden(PathBuf),
}

/// All mounts at one time, each after those below it.
#[derive(Debug)]
pub(super) struct Table(Vec<Row>);

impl Table {
    /// Reads this process's table.
    pub fn read() -> io::Result<Table> {
        Table::of("self".as_ref())
    }

    /// Reads the table of a process.
    pub fn of(process: &OsStr) -> io::Result<Table> {
        Ok(Table::parse(&std::fs::read(Path::new("/proc").join(process).join("mountinfo"))?))
    }

    /// Parses lines of: id, parent, device, root, mountpoint, ...; separated by spaces.
    fn parse(table: &[u8]) -> Table {
        let row = |line: &[u8]| {
            let mut fields = line.split(|byte| *byte == b' ');
            let mut text = || std::str::from_utf8(fields.next()?).ok();
            let (id, parent) = (text()?.parse().ok()?, text()?.parse().ok()?);
            let (major, minor) = text()?.split_once(':')?;
            let device = (major.parse().ok()?, minor.parse().ok()?);
            let path = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
            // After the options, up to a hyphen.
            let groups: Vec<&[u8]> = fields.skip(1).take_while(|field| *field != b"-").collect();
            let group = |name: &[u8]| {
                let number = groups.iter().find_map(|field| field.strip_prefix(name))?;
                std::str::from_utf8(number).ok()?.parse().ok()
            };
            let (shared, master) = (group(b"shared:"), group(b"master:"));
            Some(Row { identity: Identity { id, device }, parent, path, shared, master })
        };
        Table(table.split(|byte| *byte == b'\n').filter_map(row).collect())
    }

    /// Resolves the path of each mount, for the fuzzer.
    pub fn see_all(table: &[u8]) {
        let table = Table::parse(table);
        for row in &table.0 {
            table.seen(row);
            table.carries(row.identity.device);
        }
    }

    /// Returns the topmost mount at this path.
    pub fn top(&self, path: &Path) -> Option<&Row> {
        self.0.iter().rfind(|row| row.path == path)
    }

    /// Returns the mount with this identity.
    pub fn find(&self, identity: Identity) -> Option<&Row> {
        self.0.iter().find(|row| row.identity == identity)
    }

    /// Whether this file system is mounted.
    pub fn has(&self, device: (u32, u32)) -> bool {
        self.0.iter().any(|row| row.identity.device == device)
    }

    /// Returns the peer group of the parent mount: an unmount propagates to its members and slaves.
    pub fn group_above(&self, mount: Identity) -> Option<u64> {
        let row = self.find(mount)?;
        self.0.iter().find(|above| above.identity.id == row.parent)?.shared
    }

    /// Whether this file system stays mounted in this table after it was unmounted from a directory in this peer
    /// group (of the parent mount).
    pub fn keeps(&self, device: (u32, u32), group: Option<u64>) -> bool {
        self.0.iter().filter(|row| row.identity.device == device).any(|row| {
            let above = self.0.iter().find(|above| above.identity.id == row.parent);
            let receives = |above: &Row| above.shared == group || above.master == group;
            group.is_none() || !above.is_some_and(receives)
        })
    }

    /// Whether anything is mounted on a file of this file system.
    pub fn carries(&self, device: (u32, u32)) -> bool {
        let is_below = |row: &Row| self.0.iter().any(|on| on.identity.id == row.parent && on.identity.device == device);
        self.0.iter().any(is_below)
    }

    /// Resolves a mount's path as the kernel would.
    pub fn seen(&self, row: &Row) -> Seen {
        let own = row.identity.id;
        // The mount whose parent is not listed: the one at the root directory, or the one below that.
        let listed = |id| self.0.iter().any(|row| row.identity.id == id);
        let first = self.0.iter().find(|row| row.parent == row.identity.id || !listed(row.parent));
        let mut here = first.map_or(own, |first| first.parent);
        let (mut passed, mut at) = (here == own, PathBuf::new());
        for part in row.path.components() {
            at.push(part);
            // No more steps than mounts: a table that was read while it changed may have cycles.
            for _ in &self.0 {
                let on = self.0.iter().find(|row| row.parent == here && row.identity.id != here && row.path == at);
                let Some(next) = on else { break };
                here = next.identity.id;
                passed |= here == own;
            }
        }
        match self.0.iter().find(|row| row.identity.id == here) {
            _ if here == own => Seen::Yes,
            Some(over) if !passed => Seen::Hidden(over.path.clone()),
            _ => Seen::Covered,
        }
    }
}

/// Undoes the octal escapes of space, tab, newline and backslash.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let digits = if *first == b'\\' { after.split_first_chunk::<3>() } else { None };
        let octal = digits
            .and_then(|(digits, after)| Some((u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()?, after)));
        let (byte, after) = octal.unwrap_or((*first, after));
        out.push(byte);
        rest = after;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(row: Option<&Row>) -> Option<u64> {
        row.map(|row| row.identity.id)
    }

    #[test]
    fn finds_escaped_and_stacked_mounts() {
        let table = Table::parse(
            b"21 1 0:20 / / rw - ext4 /dev/x rw\n\
            40 21 0:41 / /mnt/a\\040b rw - fuse x rw\n\
            43 40 0:44 / /mnt/a\\040b ro shared:3 - fuse.y y rw\n\
            44 21 0:45 / /mnt/a\\134 rw - fuse.y y rw\nbroken\n",
        );
        assert!(table.carries((0, 41)) && table.carries((0, 20)) && !table.carries((0, 44)));
        assert_eq!(id(table.top(Path::new("/mnt/a b"))), Some(43));
        assert_eq!(id(table.top(Path::new("/mnt/a\\"))), Some(44));
        assert_eq!(id(table.top(Path::new("/mnt"))), None);
        assert_eq!(id(table.find(Identity { id: 40, device: (0, 41) })), Some(40));
        // The number has been given again.
        assert_eq!(table.find(Identity { id: 40, device: (0, 42) }), None);
    }

    #[test]
    fn an_unmount_propagates_to_peers_and_slaves() {
        let table = |groups: &str| {
            Table::parse(
                format!("21 1 0:20 / / rw {groups}- ext4 /dev/x rw\n40 21 0:41 / /m rw shared:9 - fuse x rw\n")
                    .as_bytes(),
            )
        };
        let own = table("shared:7 ").group_above(Identity { id: 40, device: (0, 41) });
        assert_eq!(own, Some(7));
        for (groups, keeps) in
            [("shared:7 ", false), ("master:7 ", false), ("shared:8 master:7 ", false), ("shared:8 ", true), ("", true)]
        {
            assert_eq!(table(groups).keeps((0, 41), own), keeps, "{groups}");
            assert!(table(groups).keeps((0, 41), None) && !table(groups).keeps((0, 42), own), "{groups}");
        }
    }

    #[test]
    fn a_mount_that_came_later_hides_those_below_its_place() {
        let table = Table::parse(
            b"21 1 0:20 / / rw - ext4 /dev/x rw\n\
            40 21 0:41 / /m rw - fuse x rw\n\
            41 40 0:42 / /m/home/bob rw - fuse x rw\n\
            42 40 0:43 / /m/home rw - fuse x rw\n\
            43 42 0:44 / /m/home/eve rw - fuse x rw\n\
            44 43 0:45 / /m/home/eve rw - tmpfs x rw\n",
        );
        let seen = |id| table.seen(table.0.iter().find(|row| row.identity.id == id).unwrap());
        assert_eq!(seen(21), Seen::Yes);
        assert_eq!(seen(40), Seen::Yes);
        assert_eq!(seen(41), Seen::Hidden("/m/home".into()));
        assert_eq!(seen(42), Seen::Yes);
        assert_eq!(seen(43), Seen::Covered);
        assert_eq!(seen(44), Seen::Yes);
    }

    #[test]
    fn a_table_that_goes_round_in_a_circle_has_an_end() {
        let table = Table::parse(b"1 2 0:2 / /m rw - x x rw\n2 1 0:3 / /m rw - x x rw\n3 2 0:4 / /m rw - x x rw\n");
        assert_eq!(table.0.len(), 3);
        table.0.iter().for_each(|row| drop(table.seen(row)));
    }

    #[test]
    fn the_root_may_be_its_own_parent_or_not_listed() {
        let own = Table::parse(b"1 1 0:2 / / rw - rootfs rootfs rw\n2 1 0:3 / /m rw - fuse x rw\n");
        let chroot = Table::parse(b"7 5 0:3 / /m rw - fuse x rw\n8 7 0:4 / /m/n rw - fuse x rw\n");
        for table in [own, chroot] {
            assert!(table.0.iter().all(|row| table.seen(row) == Seen::Yes));
        }
    }
}
