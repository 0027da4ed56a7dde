//! Metadata of a union's branches: whiteouts, opaque markers, redirects, origins, the index
//! of hard links. A script puts any of them anywhere; then the union is opened, listed and checked.

use std::sync::Arc;

use nacre_layers::mem::Mem;
use nacre_union::{BranchMode, Union, UnionOptions};
use nacre_vfs::{Caller, DirEntry, DirSink, Kind, Layer, Name, Node, OpenFlags, Result, WriteOrigin, XattrFlags};

/// Names with a meaning, and some without.
const NAMES: [&[u8]; 16] = [
    b"a",
    b"b",
    b"c",
    b".wh.a",
    b".wh.b",
    b".wh..wh..opq",
    b".wh..wh.links",
    b".wh..wh.work",
    b".wh..wh.tmp.1",
    b".wh..wh.a",
    b".wh.",
    b".wh..",
    b"0000000000000001-0000000000000002-0000000000000003",
    b"0000000000000001-0000000000000002-0000000000000003.n",
    b"0000000000000001-0000000000000002-0000000000000003.m",
    b"0000000000000001-0000000000000002-0000000000000003.l",
];

const ATTRIBUTES: [&[u8]; 12] = [
    b"trusted.overlay.redirect",
    b"trusted.overlay.opaque",
    b"trusted.overlay.whiteout",
    b"trusted.nacre.origin",
    b"trusted.nacre.impure",
    b"trusted.nacre.names",
    b"user.overlay.redirect",
    b"user.overlay.opaque",
    b"user.overlay.whiteout",
    b"user.fuseoverlayfs.opaque",
    b"user.nacre.origin",
    b"user.nacre.names",
];

/// Limit of visited files of a union: this metadata can form cycles.
const MOST: usize = 200;

#[derive(Default)]
struct Names(Vec<Vec<u8>>);

impl DirSink for Names {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        self.0.push(entry.name.bytes().to_vec());
        self.0.len() < MOST
    }
}

/// Runs a script: for each step the operation, the node, the name, and a value after its length.
pub fn union_marks(data: &[u8]) {
    let branches: [Arc<dyn Layer>; 3] = [Arc::new(Mem::new()), Arc::new(Mem::new()), Arc::new(Mem::new())];
    let Some((&flags, mut data)) = data.split_first() else { return };
    let mut known: Vec<(usize, Node)> = Vec::new();
    for (at, branch) in branches.iter().enumerate() {
        if let Ok(root) = branch.root() {
            known.push((at, root.node));
        }
    }
    while let Some((&[what, place, name, length], rest)) = data.split_first_chunk::<4>() {
        let (value, rest) = rest.split_at(usize::from(length).min(rest.len()));
        data = rest;
        // A branch that refuses a step does not have the entry.
        let _ = step(&branches, &mut known, (what, place, name), value);
    }
    let mode = |word: &str| BranchMode::parse(word).unwrap_or(BranchMode::ro());
    let modes = if flags & 1 == 0 { ["rw", "ro", "ro"] } else { ["rw", "rw", "ro+wh"] };
    let members = branches.into_iter().zip(modes).map(|(branch, word)| (branch, mode(word))).collect();
    let options =
        UnionOptions { directory_redirect: flags & 2 != 0, link_cow: flags & 4 != 0, ..UnionOptions::default() };
    let Ok(union) = Union::new(members, options) else { return };
    let union = Arc::new(union);
    look(&*union.layer());
    let _ = union.check(false);
    if flags & 8 != 0 {
        let _ = union.check(true);
        look(&*union.layer());
    }
}

fn step(
    branches: &[Arc<dyn Layer>],
    known: &mut Vec<(usize, Node)>,
    (what, place, name): (u8, u8, u8),
    value: &[u8],
) -> Result<()> {
    let Some((at, node)) = usize::from(place).checked_rem(known.len()).and_then(|place| known.get(place).cloned())
    else {
        return Ok(());
    };
    let Some(branch) = branches.get(at) else { return Ok(()) };
    let bytes = NAMES.get(usize::from(name)).copied().unwrap_or(value);
    let by = &Caller::ROOT;
    let made = match what % 7 {
        0 => branch.mkdir(by, &node, Name::new(bytes)?, 0o755)?,
        1 => branch.create(by, &node, Name::new(bytes)?, 0o644 | u32::from(what & 0x80) << 4, OpenFlags::READ)?.0,
        2 => branch.symlink(by, &node, Name::new(bytes)?, value)?,
        3 => branch.mknod(by, &node, Name::new(bytes)?, Kind::Character, 0o600, (0, 0))?,
        4 => {
            let attribute = ATTRIBUTES.get(usize::from(name) % ATTRIBUTES.len()).copied().unwrap_or_default();
            return branch.setxattr(by, &node, attribute, value, XattrFlags::default());
        }
        5 => {
            let (file, opened) = branch.create(by, &node, Name::new(bytes)?, 0o644, OpenFlags::WRITE)?;
            opened.write(value, 0, WriteOrigin::Caller)?;
            file
        }
        _ => {
            let from = value.first().map_or(0, |from| usize::from(*from));
            let Some((other, file)) = from.checked_rem(known.len()).and_then(|from| known.get(from)) else {
                return Ok(());
            };
            if *other != at {
                return Ok(());
            }
            branch.link(by, file, None, &node, Name::new(bytes)?)?
        }
    };
    known.push((at, made.node));
    Ok(())
}

/// Lists everything, with attributes, and opens the files that can be opened.
fn look(layer: &dyn Layer) {
    let Ok(root) = layer.root() else { return };
    let (mut waiting, mut seen) = (vec![root.node], 0);
    while let Some(directory) = waiting.pop() {
        let mut names = Names::default();
        let _ = layer.readdir(&Caller::ROOT, &directory, 0, seen % 2 == 0, &mut names);
        for name in names.0 {
            seen += 1;
            if seen > MOST {
                return;
            }
            let Ok(name) = Name::new(&name) else { continue };
            let Ok(found) = layer.lookup(&Caller::ROOT, &directory, name) else { continue };
            let mut value = [0; 64];
            let _ = (
                layer.getattr(&Caller::ROOT, &found.node, None),
                layer.listxattr(&Caller::ROOT, &found.node, &mut value),
            );
            match found.attr.kind {
                Kind::Directory => waiting.push(found.node),
                Kind::File => drop(layer.open(&Caller::ROOT, &found.node, OpenFlags::READ)),
                Kind::Symlink => drop(layer.readlink(&Caller::ROOT, &found.node)),
                _ => {}
            }
        }
    }
}
