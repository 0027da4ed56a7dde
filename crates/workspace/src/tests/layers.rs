//! Layers in OCI's form: exported, read by tar(1), and imported.

use super::support::{Workspace, assert_same, names, tree};
use nacre_vfs::{OpenFlags, SetAttr, WriteOrigin, XattrFlags};
use std::{fs, path::Path, process::Command};
use tar::{Builder, EntryType, Header};

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

fn fill(base: &Path) {
    fs::create_dir(base.join("d")).unwrap();
    for path in ["gone", "changed", "d/inside", "d/other"] {
        fs::write(base.join(path), path).unwrap();
    }
    fs::create_dir(base.join("replaced")).unwrap();
    fs::write(base.join("replaced/old"), "old").unwrap();
}

/// A workspace with changes of many kinds.
fn changed() -> Workspace {
    let workspace = Workspace::over(fill);
    let view = workspace.view();
    view.layer.unlink(&view.caller, &view.root, name("gone")).unwrap();
    let d = view.find(b"d").unwrap().node;
    view.layer.unlink(&view.caller, &d, name("inside")).unwrap();
    let replaced = view.find(b"replaced").unwrap().node;
    view.layer.unlink(&view.caller, &replaced, name("old")).unwrap();
    view.layer.rmdir(&view.caller, &view.root, name("replaced")).unwrap();
    let replaced = view.directory(b"replaced");
    view.file_in(&replaced, b"new", b"new");
    let file = view.find(b"changed").unwrap().node;
    view.open(&file, OpenFlags::READ_WRITE).write(b"CHANGED", 0, WriteOrigin::Caller).unwrap();
    let (first, _) = view.file(b"first", b"linked");
    view.layer.link(&view.caller, &first.node, None, &d, name("second")).unwrap();
    view.layer.setxattr(&view.caller, &first.node, b"user.one", b"va\0lue", XattrFlags::default()).unwrap();
    view.layer.symlink(&view.caller, &view.root, name("link"), b"../elsewhere").unwrap();
    let long = "long-".repeat(40);
    view.file(long.as_bytes(), b"long");
    view.file(b"\xff\x80", b"bytes");
    let (sparse, _) = view.file(b"sparse", b"");
    view.change(&sparse.node, SetAttr { size: Some(100_000), ..SetAttr::default() });
    workspace
}

fn exported(workspace: &Workspace) -> Vec<u8> {
    let mut archive = Vec::new();
    crate::export(&workspace.opened().1, &mut archive).unwrap();
    archive
}

#[test]
fn an_exported_layer_is_imported_into_another_workspace() {
    let workspace = changed();
    let wanted = tree(&workspace.view());
    let archive = exported(&workspace);
    let other = Workspace::over(fill);
    let (base, upper) = other.opened();
    crate::import(&base, &upper, &mut archive.as_slice()).unwrap();
    let mut got = tree(&other.view());
    // The bases were filled at different times, and holes are data in archives.
    let mut wanted = wanted;
    for tree in [&mut got, &mut wanted] {
        for (path, entry) in tree.iter_mut() {
            entry.data.clear();
            if entry.kind == nacre_vfs::Kind::Directory || path == b"/d/other" {
                entry.modified = (0, 0);
            }
        }
    }
    assert_same(&got, &wanted, "imported");
    let wanted = tree(&other.view());
    other.commit();
    assert_same(&super::support::tree_of(&other.base), &wanted, "committed");
    other.assert_clean();
}

#[test]
fn other_programs_read_a_layer() {
    let workspace = changed();
    let (archive, out) = (workspace.base.with_file_name("layer.tar"), workspace.base.with_file_name("out"));
    fs::write(&archive, exported(&workspace)).unwrap();
    fs::create_dir(&out).unwrap();
    let output = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (path, content) in [("changed", "CHANGED"), ("replaced/new", "new"), ("d/second", "linked"), (".wh.gone", "")] {
        assert_eq!(fs::read_to_string(out.join(path)).unwrap(), content, "{path}");
    }
    assert_eq!(names(&out.join("d")), [".wh.inside", "second"]);
    assert_eq!(names(&out.join("replaced")), [".wh..wh..opq", "new"]);
}

/// An archive with one entry.
fn archive_of(kind: EntryType, path: &[u8], target: &str, content: &[u8]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_uid(u64::from(rustix::process::geteuid().as_raw()));
    header.set_gid(u64::from(rustix::process::getegid().as_raw()));
    header.set_mtime(1);
    header.as_old_mut().name[..path.len()].copy_from_slice(path);
    if !target.is_empty() {
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
    }
    header.set_cksum();
    archive.append(&header, content).unwrap();
    archive.into_inner().unwrap()
}

#[test]
fn hostile_archives_write_nowhere_else_and_leave_nothing() {
    let workspace = Workspace::over(fill);
    let outside = workspace.base.with_file_name("outside");
    fs::create_dir(&outside).unwrap();
    let target = outside.to_str().unwrap();
    // Without the two empty blocks at the end, entries of another archive follow.
    let link = archive_of(EntryType::Symlink, b"link", target, b"");
    let through = [&link[..512], &archive_of(EntryType::Regular, b"link/file", "", b"x")].concat();
    for (what, archive) in [
        ("a path that leads out", archive_of(EntryType::Regular, b"../file", "", b"x")),
        ("a path through a link", through),
        ("a hard link to the outside", archive_of(EntryType::Link, b"hard", "../outside/secret", b"")),
        ("garbage", vec![7; 2048]),
    ] {
        let (base, upper) = workspace.opened();
        assert!(crate::import(&base, &upper, &mut archive.as_slice()).is_err(), "{what}");
        assert_eq!(names(&outside), [""; 0], "{what}");
        assert_eq!(names(&workspace.upper_path()), [""; 0], "{what}");
    }
}
