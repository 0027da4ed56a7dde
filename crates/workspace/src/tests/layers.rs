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
    let (base, upper) = workspace.opened();
    crate::export(&base, &upper, &mut archive).unwrap();
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

#[test]
fn a_mark_that_hides_no_name_is_refused_and_nothing_of_the_layer_stays() {
    for mark in ["a/.wh..", "a/.wh..."] {
        let workspace = Workspace::over(|base| fs::create_dir(base.join("a")).unwrap());
        let mut archive = Builder::new(Vec::new());
        for path in ["first", mark] {
            let mut header = Header::new_ustar();
            header.set_entry_type(EntryType::Regular);
            header.set_mode(0o644);
            header.set_size(0);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_path(path).unwrap();
            header.set_cksum();
            archive.append(&header, &b""[..]).unwrap();
        }
        let archive = archive.into_inner().unwrap();
        let (base, upper) = workspace.opened();
        let error = crate::import(&base, &upper, &mut archive.as_slice()).unwrap_err();
        assert!(error.what.contains("hides no name"), "{mark}: {error}");
        assert_eq!(names(&workspace.upper_path()), [""; 0]);
    }
}

/// An archive at whose reading a file appears.
struct Interfering<'a> {
    archive: &'a [u8],
    path: std::path::PathBuf,
}

impl std::io::Read for Interfering<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        fs::write(&self.path, "")?;
        self.archive.read(buffer)
    }
}

#[test]
fn a_layer_that_cannot_get_its_names_leaves_nothing() {
    let workspace = Workspace::over(fill);
    let archive = exported(&changed());
    let (base, upper) = workspace.opened();
    let log = fs::read(workspace.changes.join("base.log")).unwrap();
    // A name that the upper has, but no user sees, comes in the way of one of the layer while the archive is read.
    let in_the_way = workspace.upper_path().join(".wh.gone");
    let mut archive = Interfering { archive: archive.as_slice(), path: in_the_way.clone() };
    let import = crate::import(&base, &upper, &mut archive);
    import.unwrap_err();
    fs::remove_file(&in_the_way).unwrap();
    assert_eq!(names(&workspace.upper_path()), [""; 0]);
    assert_eq!(fs::read(workspace.changes.join("base.log")).unwrap(), log);
}

#[test]
fn a_changed_file_is_exported_with_the_names_that_only_the_base_has() {
    let fill = |base: &Path| {
        fs::create_dir(base.join("d")).unwrap();
        fs::write(base.join("a"), "base").unwrap();
        for name in ["d/b", "c"] {
            fs::hard_link(base.join("a"), base.join(name)).unwrap();
        }
    };
    for remove in [false, true] {
        let workspace = Workspace::over(fill);
        let view = workspace.view();
        let file = view.find(b"a").unwrap().node;
        view.open(&file, OpenFlags::READ_WRITE).write(b"OURS", 0, WriteOrigin::Caller).unwrap();
        if remove {
            view.layer.unlink(&view.caller, &view.root, name("a")).unwrap();
        }
        drop(view);
        let wanted = tree(&workspace.view());
        let archive = exported(&workspace);
        let other = Workspace::over(fill);
        let (base, upper) = other.opened();
        crate::import(&base, &upper, &mut archive.as_slice()).unwrap();
        let got = tree(&other.view());
        assert_eq!(got.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
        for path in [&b"/d/b"[..], b"/c"] {
            assert_eq!((&got[path].content[..], &got[path].first_name), (&b"OURS"[..], &wanted[path].first_name));
        }
    }
}
