//! Each form of mark, written and read over a tree in memory and over a real directory.

use super::*;
use nacre_layers::{
    host::{Host, HostOptions},
    mem::Mem,
};
use nacre_testkit::name;
use nacre_vfs::OpenFlags;
use std::sync::Arc;

const OWN: &Caller = &Caller::ROOT;

/// A branch with a work directory and a directory `d`.
struct Branch {
    layer: Arc<dyn Layer>,
    work: Node,
    d: Node,
    _scratch: Option<tempfile::TempDir>,
}

impl Branch {
    fn new(layer: Arc<dyn Layer>, scratch: Option<tempfile::TempDir>) -> Branch {
        let root = layer.root().unwrap().node;
        let work = layer.mkdir(OWN, &root, name(b".wh..wh.work"), 0o700).unwrap().node;
        let d = layer.mkdir(OWN, &root, name(b"d"), 0o755).unwrap().node;
        Branch { layer, work, d, _scratch: scratch }
    }

    fn both() -> [Branch; 2] {
        let scratch = tempfile::tempdir().unwrap();
        let host = Arc::new(Host::open(HostOptions::new(scratch.path())).unwrap());
        [Branch::new(Arc::new(Mem::new()), None), Branch::new(host, Some(scratch))]
    }

    fn file(&self, bytes: &[u8]) {
        self.layer.create(OWN, &self.d, name(bytes), 0o644, OpenFlags::WRITE).unwrap();
    }

    fn look(&self, marks: &Marks, bytes: &[u8]) -> &'static str {
        let x = marks.opacity(&*self.layer, &self.d).unwrap().x;
        match marks.look(&*self.layer, OWN, &self.d, name(bytes), true, x).unwrap() {
            Seen::Absent => "absent",
            Seen::WhitedOut => "whited out",
            Seen::Found(entry) if entry.attr.kind == Kind::Directory => "directory",
            Seen::Found(_) => "file",
        }
    }

    fn hide(&self, marks: &Marks, bytes: &[u8]) -> Result<bool> {
        marks.hide(&*self.layer, &|| Ok(&self.work), name(b"temp"), &self.d, name(bytes))
    }

    fn names(&self, directory: &Node) -> Vec<String> {
        struct Names(Vec<String>);
        impl nacre_vfs::DirSink for Names {
            fn push(&mut self, entry: nacre_vfs::DirEntry<'_>) -> bool {
                self.0.push(entry.name.to_string());
                true
            }
        }
        let mut names = Names(Vec::new());
        self.layer.readdir(OWN, directory, 0, false, &mut names).unwrap();
        names.0.sort();
        names.0
    }
}

fn styles() -> [Marks; 4] {
    [
        (Style::Wh, Namespace::User),
        (Style::Chardev, Namespace::Trusted),
        (Style::Xattr, Namespace::Trusted),
        (Style::Xattr, Namespace::User),
    ]
    .map(|(style, namespace)| Marks { style, namespace })
}

/// Real file systems let only root write some of the forms.
fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

#[test]
fn what_is_hidden_is_seen_as_such_in_every_form() {
    for marks in styles() {
        for branch in Branch::both() {
            if branch._scratch.is_some() && !is_root() && marks.style != Style::Wh {
                continue;
            }
            for long in [false, true] {
                let subject = if long { vec![b'n'; 255] } else { b"subject".to_vec() };
                assert_eq!(branch.look(&marks, &subject), "absent");
                branch.hide(&marks, &subject).unwrap();
                assert_eq!(branch.look(&marks, &subject), "whited out", "{marks:?}");
                branch.hide(&marks, &subject).unwrap();
                assert_eq!(branch.look(&marks, &subject), "whited out", "twice is once");
                let unread = marks.look(&*branch.layer, OWN, &branch.d, name(&subject), false, false).unwrap();
                assert!(!matches!(unread, Seen::WhitedOut), "on branches whose marks do not count");
                if marks.style == Style::Wh {
                    marks.unhide(&*branch.layer, &branch.d, name(&subject)).unwrap();
                    marks.unhide(&*branch.layer, &branch.d, name(&subject)).unwrap();
                } else {
                    branch.layer.unlink(OWN, &branch.d, name(&subject)).unwrap();
                }
                assert_eq!(branch.look(&marks, &subject), "absent");
            }
            assert!(branch.names(&branch.work).is_empty(), "nothing is left behind: {marks:?}");
            assert!(branch.names(&branch.d).is_empty());
        }
    }
}

#[test]
fn a_file_is_replaced_in_one_step_or_stands_beside_its_mark() {
    for marks in styles() {
        let [branch, _] = Branch::both();
        branch.file(b"f");
        let took = branch.hide(&marks, b"f").unwrap();
        assert_eq!(took, marks.style != Style::Wh, "{marks:?}");
        assert_eq!(
            branch.look(&marks, b"f"),
            if took { "whited out" } else { "file" },
            "a mark does not hide its own branch's file"
        );
        if !took {
            assert_eq!(stands_beside(&*branch.layer, &branch.d, name(b"f")), Ok(true));
            assert_eq!(stands_beside(&*branch.layer, &branch.d, name(b"g")), Ok(false));
            branch.layer.unlink(OWN, &branch.d, name(b"f")).unwrap();
            assert_eq!(branch.look(&marks, b"f"), "whited out");
        }
    }
}

#[test]
fn a_directory_is_exchanged_for_its_whiteout() {
    for marks in &styles()[1..] {
        for branch in Branch::both() {
            if branch._scratch.is_some() && !is_root() {
                continue;
            }
            let inner = branch.layer.mkdir(OWN, &branch.d, name(b"sub"), 0o755).unwrap().node;
            branch.layer.mkdir(OWN, &inner, name(b"inner"), 0o755).unwrap();
            assert_eq!(branch.hide(marks, b"sub"), Ok(true));
            assert_eq!(branch.look(marks, b"sub"), "whited out");
            assert_eq!(branch.names(&branch.work), ["temp"]);
            assert_eq!(branch.names(&branch.layer.lookup(OWN, &branch.work, name(b"temp")).unwrap().node), ["inner"]);
        }
    }
}

#[test]
fn every_form_of_opaque_is_read() {
    let reader = Marks { style: Style::Wh, namespace: Namespace::Trusted };
    for (attribute, value, opaque, x) in [
        ("trusted.overlay.opaque", "y", true, false),
        ("user.overlay.opaque", "y", true, false),
        ("user.fuseoverlayfs.opaque", "y", true, false),
        ("trusted.overlay.opaque", "x", false, true),
        ("user.overlay.opaque", "x", false, true),
        ("trusted.overlay.opaque", "n", false, false),
        ("user.other", "y", false, false),
    ] {
        let [branch, _] = Branch::both();
        branch.layer.setxattr(OWN, &branch.d, attribute.as_bytes(), value.as_bytes(), XattrFlags::default()).unwrap();
        let opacity = reader.opacity(&*branch.layer, &branch.d).unwrap();
        assert_eq!((opacity.opaque, opacity.x), (opaque, x), "{attribute}={value}");
    }
    let [branch, _] = Branch::both();
    assert_eq!(reader.opacity(&*branch.layer, &branch.d), Ok(Opacity::default()));
    branch.file(OPAQUE);
    assert!(reader.opacity(&*branch.layer, &branch.d).unwrap().opaque);
}

#[test]
fn directories_are_made_opaque_in_every_form() {
    for marks in styles() {
        for branch in Branch::both() {
            if branch._scratch.is_some() && !is_root() && marks.namespace == Namespace::Trusted {
                continue;
            }
            marks.make_opaque(&*branch.layer, &branch.d).unwrap();
            marks.make_opaque(&*branch.layer, &branch.d).unwrap();
            assert_eq!(
                marks.opacity(&*branch.layer, &branch.d),
                Ok(Opacity { opaque: true, ..Opacity::default() }),
                "{marks:?}"
            );
        }
    }
}

#[test]
fn whiteouts_do_not_come_to_light_when_their_directory_becomes_opaque() {
    for marks in &styles()[1..] {
        let [branch, _] = Branch::both();
        branch.file(b"empty");
        for number in 0..600 {
            branch.hide(marks, format!("gone{number}").as_bytes()).unwrap();
        }
        marks.make_opaque(&*branch.layer, &branch.d).unwrap();
        assert_eq!(marks.opacity(&*branch.layer, &branch.d), Ok(Opacity { opaque: true, ..Opacity::default() }));
        assert_eq!(branch.names(&branch.d), ["empty"]);
    }
}

#[test]
fn in_an_opaque_directory_no_attribute_is_needed_to_hide() {
    let marks = styles()[2];
    let [branch, _] = Branch::both();
    marks.make_opaque(&*branch.layer, &branch.d).unwrap();
    assert_eq!(branch.hide(&marks, b"f"), Ok(false));
    assert!(branch.names(&branch.d).is_empty());
}

#[test]
fn redirects_are_believed_in_one_namespace() {
    for (namespace, believed) in [(Namespace::Trusted, &b"mine"[..]), (Namespace::User, b"yours")] {
        let [branch, _] = Branch::both();
        branch.layer.setxattr(OWN, &branch.d, b"trusted.overlay.redirect", b"mine", XattrFlags::default()).unwrap();
        branch.layer.setxattr(OWN, &branch.d, b"user.overlay.redirect", b"yours", XattrFlags::default()).unwrap();
        let marks = Marks { style: Style::Wh, namespace };
        assert_eq!(marks.opacity(&*branch.layer, &branch.d).unwrap().redirect.as_deref(), Some(believed));
    }
}

#[test]
fn devices_and_empty_files_are_files_elsewhere() {
    let marks = styles()[1];
    let [branch, _] = Branch::both();
    branch.layer.mknod(OWN, &branch.d, name(b"null"), Kind::Character, 0o666, (1, 3)).unwrap();
    branch.file(b"empty");
    let empty = branch.layer.lookup(OWN, &branch.d, name(b"empty")).unwrap().node;
    branch.layer.setxattr(OWN, &empty, b"trusted.overlay.whiteout", b"y", XattrFlags::default()).unwrap();
    assert_eq!(branch.look(&marks, b"null"), "file");
    let zero = branch.layer.mknod(OWN, &branch.d, name(b"zero"), Kind::Character, 0o666, (0, 0)).unwrap().node;
    assert_eq!(branch.look(&marks, b"zero"), "whited out");
    marks.keep_device(&*branch.layer, &zero).unwrap();
    assert_eq!(branch.look(&marks, b"zero"), "file");
    assert_eq!(branch.look(&marks, b"empty"), "file", "only directories that say so have such whiteouts");
}

#[test]
fn names_in_listings() {
    for (text, wanted) in [
        ("a", NameMark::Plain),
        (".wh", NameMark::Plain),
        (".w", NameMark::Plain),
        (".wh.a", NameMark::Hides(name(b"a"))),
        (".wh..a", NameMark::Hides(name(b".a"))),
        (".wh.", NameMark::Private),
        (".wh..", NameMark::Private),
        (".wh...", NameMark::Private),
        (".wh..wh..opq", NameMark::Private),
        (".wh..wh.aufs", NameMark::Private),
        (".wh..wh.plnk", NameMark::Private),
        (".wh..wh.h.0123", NameMark::HidesLong),
    ] {
        assert_eq!(listed(name(text.as_bytes())), wanted, "{text}");
        assert_eq!(is_reserved(text.as_bytes()), wanted != NameMark::Plain);
    }
}

#[test]
fn names_that_fit_just_so() {
    for (length, long) in [(251, false), (252, true), (255, true)] {
        let text = vec![b'x'; length];
        let mark = mark_name(name(&text));
        assert!(mark.len() <= NAME_MAX);
        assert_eq!(mark.starts_with(LONG), long, "{length}");
    }
    let [branch, _] = Branch::both();
    branch.layer.symlink(OWN, &branch.d, name(b".wh..wh.h.beef"), b"something").unwrap();
    assert_eq!(
        long_name(&*branch.layer, &branch.d, name(b".wh..wh.h.beef")),
        Ok(None),
        "it must be the digest of the name"
    );
}

#[test]
fn the_unions_own_attributes() {
    for (text, private) in [
        ("trusted.overlay.opaque", true),
        ("user.overlay.origin", true),
        ("trusted.nacre.origin", true),
        ("user.nacre.origin", true),
        ("user.fuseoverlayfs.opaque", true),
        ("user.overlay", false),
        ("trusted.overlay.overlay.opaque", false),
        ("user.comment", false),
        ("security.capability", false),
    ] {
        assert_eq!(is_private_xattr(text.as_bytes()), private, "{text}");
    }
}

#[test]
fn the_namespace_is_found_out_and_nothing_is_left() {
    for branch in Branch::both() {
        let wanted = if branch._scratch.is_some() && !is_root() { Namespace::User } else { Namespace::Trusted };
        assert_eq!(Marks::probe(&*branch.layer, &branch.work), Ok(wanted));
        assert_eq!(attributes(&*branch.layer, &branch.work), Ok(Vec::new()));
    }
}

#[test]
fn forms_read_what_they_write() {
    for text in ["wh", "chardev", "xattr"] {
        assert_eq!(text.parse::<Style>().unwrap().to_string(), text);
    }
    assert!("aufs".parse::<Style>().unwrap_err().to_string().contains("there are wh, chardev and xattr"));
}
