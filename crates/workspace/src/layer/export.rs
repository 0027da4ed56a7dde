//! Writing a layer.

use super::XATTR;
use crate::{
    Base, Result, Upper,
    beneath::Tree,
    compare,
    meta::{Meta, shown_attributes},
    trouble::{During, fact},
    upper::{MARK, OPAQUE},
};
use rustix::fs::FileType;
use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};
use tar::{Builder, EntryType, Header};

/// Bytes of the fields for names in a header.
const NAME_FIELD: usize = 100;

/// Writes the upper as tar: a layer in OCI's form, with whiteouts. A changed file has all names that it has in the view, also
/// those that only the base has.
///
/// # Errors
/// Something cannot be read, or `out` fails.
pub fn export(base: &Base, upper: &Upper, out: &mut dyn Write) -> Result<()> {
    let comparison = compare::compare(base, upper)?;
    let scan = &comparison.scan;
    let mut archive = Builder::new(out);
    let mut names: HashMap<u64, PathBuf> = HashMap::new();
    // A whiteout comes before what replaces the name, in the order of paths.
    let mut marks: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for hidden in scan.whiteouts.keys().filter(|path| !scan.entries.contains_key(*path)) {
        let (Some(parent), Some(name)) = (hidden.parent(), hidden.file_name()) else { continue };
        let mut mark = MARK.to_vec();
        mark.extend_from_slice(name.as_bytes());
        marks.insert(hidden.clone(), parent.join(std::ffi::OsStr::from_bytes(&mark)));
    }
    for (path, entry) in &scan.entries {
        if !path.as_os_str().is_empty() {
            let from = Source { tree: &upper.tree, place: path };
            append(&mut archive, &from, path, &entry.meta, &mut names)?;
        }
        if entry.opaque {
            append_mark(&mut archive, &path.join(std::ffi::OsStr::from_bytes(OPAQUE)))?;
        }
    }
    for (path, item) in comparison.items.iter().filter(|(_, item)| item.in_links.is_some() && item.is_changed()) {
        let (tree, place) = item.place(upper, path);
        append(&mut archive, &Source { tree, place: &place }, path, &item.upper.meta, &mut names)?;
    }
    for mark in marks.values() {
        append_mark(&mut archive, mark)?;
    }
    archive.finish().during("write", Path::new("the archive"))
}

/// A header with a name, and the PAX records that it needs.
struct Head {
    header: Header,
    records: Vec<(String, Vec<u8>)>,
}

impl Head {
    fn new(kind: EntryType, name: &[u8]) -> Head {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_size(0);
        let mut head = Head { header, records: Vec::new() };
        fill(&mut head.header.as_old_mut().name, name);
        if name.len() > NAME_FIELD || !name.is_ascii() {
            head.records.push(("path".to_owned(), name.to_vec()));
        }
        head
    }

    fn set_target(&mut self, target: &[u8]) {
        fill(&mut self.header.as_old_mut().linkname, target);
        if target.len() > NAME_FIELD || !target.is_ascii() {
            self.records.push(("linkpath".to_owned(), target.to_vec()));
        }
    }

    fn set_meta(&mut self, meta: &Meta) {
        self.header.set_mode(meta.permissions());
        self.header.set_uid(meta.uid.into());
        self.header.set_gid(meta.gid.into());
        let (seconds, nanos) = meta.mtime;
        self.header.set_mtime(u64::try_from(seconds).unwrap_or(0));
        if nanos != 0 || seconds < 0 {
            self.records.push(("mtime".to_owned(), decimal(seconds, nanos).into_bytes()));
        }
    }

    fn write<W: Write>(mut self, archive: &mut Builder<W>, content: impl Read) -> io::Result<()> {
        if !self.records.is_empty() {
            archive.append_pax_extensions(self.records.iter().map(|(key, value)| (key.as_str(), value.as_slice())))?;
        }
        self.header.set_cksum();
        archive.append(&self.header, content)
    }
}

/// A time as PAX has it; before 1970 with a minus sign for the whole number.
fn decimal(seconds: i64, nanos: u32) -> String {
    if seconds < 0 && nanos > 0 {
        return format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos);
    }
    format!("{seconds}.{nanos:09}")
}

/// Fills a field with as much of a name as it takes.
fn fill(field: &mut [u8; NAME_FIELD], name: &[u8]) {
    for (to, from) in field.iter_mut().zip(name) {
        *to = *from;
    }
}

fn append_mark<W: Write>(archive: &mut Builder<W>, path: &Path) -> Result<()> {
    let mut head = Head::new(EntryType::Regular, path.as_os_str().as_bytes());
    head.header.set_mode(0o600);
    head.header.set_uid(0);
    head.header.set_gid(0);
    head.header.set_mtime(0);
    head.write(archive, io::empty()).during("write", path)
}

/// Where an entry lies.
struct Source<'a> {
    tree: &'a Tree,
    place: &'a Path,
}

fn append<W: Write>(
    archive: &mut Builder<W>,
    from: &Source<'_>,
    path: &Path,
    meta: &Meta,
    names: &mut HashMap<u64, PathBuf>,
) -> Result<()> {
    let shown = from.tree.path_of(from.place);
    let mut name = path.as_os_str().as_bytes().to_vec();
    let kind = match meta.kind() {
        FileType::RegularFile => EntryType::Regular,
        FileType::Directory => EntryType::Directory,
        FileType::Symlink => EntryType::Symlink,
        FileType::CharacterDevice => EntryType::Char,
        FileType::BlockDevice => EntryType::Block,
        FileType::Fifo => EntryType::Fifo,
        // Tar has no sockets; programs make theirs anew.
        _ => return Ok(()),
    };
    if let Some(first) = names.get(&meta.ino).filter(|_| !meta.is_directory()) {
        let mut head = Head::new(EntryType::Link, &name);
        head.set_target(first.as_os_str().as_bytes());
        head.set_meta(meta);
        return head.write(archive, io::empty()).during("write", &shown);
    }
    if kind == EntryType::Directory {
        name.push(b'/');
    }
    let mut head = Head::new(kind, &name);
    head.set_meta(meta);
    for (key, value) in shown_attributes(&from.tree.xattrs(from.place).during("read the attributes of", &shown)?) {
        let Ok(key) = String::from_utf8(key) else {
            return Err(fact(&shown, "has an attribute whose name no archive can hold"));
        };
        head.records.push((format!("{XATTR}{key}"), value));
    }
    match kind {
        EntryType::Symlink => {
            let target = from.tree.link_target(from.place).during("read the link", &shown)?;
            head.set_target(&target);
        }
        EntryType::Char | EntryType::Block => {
            let set = head
                .header
                .set_device_major(meta.special.0)
                .and_then(|()| head.header.set_device_minor(meta.special.1));
            set.during("write", &shown)?;
        }
        EntryType::Regular => {
            let file = File::from(from.tree.file(from.place).during("open", &shown)?);
            head.header.set_size(meta.size);
            // Exactly the size of the header, also where the file is written to meanwhile.
            let content = file.take(meta.size).chain(io::repeat(0)).take(meta.size);
            names.insert(meta.ino, path.to_path_buf());
            return head.write(archive, content).during("write", &shown);
        }
        _ => {}
    }
    names.insert(meta.ino, path.to_path_buf());
    head.write(archive, io::empty()).during("write", &shown)
}
