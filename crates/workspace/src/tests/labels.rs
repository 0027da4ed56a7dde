//! Labels of security modules: a file that replaces another one takes its label over.

use super::support::{Workspace, looked_at};
use nacre_sys::xattrat::{self, Target};
use nacre_testkit::World;
use nacre_vfs::{OpenFlags, RenameFlags, WriteOrigin};
use std::{fs, os::fd::AsFd, path::Path};

const LABEL: &[u8] = b"security.selinux";

fn set_label(path: &Path, label: &[u8]) -> std::io::Result<()> {
    xattrat::set(Target::File(fs::File::open(path)?.as_fd()), LABEL, label, 0)
}

fn label_of(path: &Path) -> Option<Vec<u8>> {
    crate::beneath::xattr(Target::File(fs::File::open(path).unwrap().as_fd()), LABEL).unwrap()
}

fn name(text: &str) -> nacre_vfs::Name<'_> {
    nacre_vfs::Name::new(text.as_bytes()).unwrap()
}

fn write(view: &World, path: &[u8], content: &[u8]) {
    let file = view.find(path).unwrap();
    view.open(&file.node, OpenFlags::READ_WRITE).write(content, 0, WriteOrigin::Caller).unwrap();
}

/// Whether root may set labels: not where a security module checks them.
fn can_label() -> bool {
    let file = tempfile::NamedTempFile::new().unwrap();
    rustix::process::geteuid().is_root() && set_label(file.path(), b"any:label").is_ok()
}

#[test]
fn a_file_that_replaces_another_one_has_its_label() {
    if !can_label() {
        return;
    }
    let workspace = Workspace::over(|base| {
        for name in ["written", "replaced", "plain", "moved"] {
            fs::write(base.join(name), "base").unwrap();
        }
        for name in ["written", "replaced", "moved"] {
            set_label(&base.join(name), name.as_bytes()).unwrap();
        }
    });
    let view = workspace.view();
    write(&view, b"written", b"ours, longer");
    write(&view, b"plain", b"ours");
    view.file(b"temporary", b"ours");
    view.layer
        .rename(&view.caller, &view.root, name("temporary"), &view.root, name("replaced"), RenameFlags(0))
        .unwrap();
    write(&view, b"moved", b"ours");
    view.layer.rename(&view.caller, &view.root, name("moved"), &view.root, name("new-name"), RenameFlags(0)).unwrap();
    view.file(b"added", b"ours");
    drop(view);
    // A security module gives the files of the state directory the label of their directory.
    for name in ["written", "replaced", "plain", "new-name", "added"] {
        set_label(&workspace.upper_path().join(name), b"of the state directory").unwrap();
    }
    workspace.commit();
    let wanted: [(&str, Option<&[u8]>); 5] = [
        ("written", Some(b"written")),
        ("replaced", Some(b"replaced")),
        ("new-name", Some(b"moved")),
        ("plain", None),
        ("added", None),
    ];
    for (name, label) in wanted {
        assert_eq!(label_of(&workspace.base.join(name)).as_deref(), label, "{name}");
        assert!(looked_at(&workspace.base.join(name)).2.starts_with(b"ours"), "{name}");
    }
    workspace.assert_clean();
}

#[test]
fn a_file_without_another_label_is_moved_and_not_copied() {
    let workspace = Workspace::over(|base| fs::write(base.join("written"), "base").unwrap());
    let view = workspace.view();
    write(&view, b"written", b"ours");
    view.file(b"added", b"ours");
    drop(view);
    let inode = looked_at(&workspace.upper_path().join("added")).1;
    workspace.commit();
    assert_eq!(looked_at(&workspace.base.join("added")).1, inode);
}
