//! Resent requests over a union, where they copy up files of a lower branch, hide, move and replace them: the content
//! of the branches is the same as without a crash.

use super::lives::{Death, Lives, number};
use fusewire::{Op, abi};
use nacre_vfs::{Caller, Errno, Name, OpenFlags, WriteOrigin};
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, symlink},
    path::Path,
};

/// Filters forward everything that is used here.
const LINE: &str = "union:SOURCE=rw:LOWER=ro | remap:perms=a+r";
const WRITE: u32 = 0o2;
const CREATE: u32 = 0o102;
const EXCL: u32 = 0o200;
const APPEND: u32 = 0o2002;
const EXCHANGE: u32 = 2;
/// `XATTR_CREATE`.
const XATTR_CREATE: u32 = 1;

const FILES: [&str; 19] = [
    "gone",
    "again",
    "made",
    "name",
    "node",
    "link",
    "old",
    "over",
    "left",
    "right",
    "linked",
    "tagged",
    "untagged",
    "log",
    "replaced",
    "dir/x",
    "dir/y",
    "empty/.keep",
    "tree/in/file",
];

fn fill(lower: &Path) {
    for name in FILES {
        let path = lower.join("low").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("{name} of the branch below")).unwrap();
    }
    fs::remove_file(lower.join("low/empty/.keep")).unwrap();
    symlink("target", lower.join("low/symlink")).unwrap();
    rustix::fs::setxattr(lower.join("low/untagged"), "user.x", b"1", rustix::fs::XattrFlags::empty()).unwrap();
}

/// All content of a branch, as text: type, links, content, names of attributes.
fn listing(top: &Path) -> BTreeMap<String, String> {
    fn walk(top: &Path, at: &Path, all: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let (status, kind) =
                (fs::symlink_metadata(&path).unwrap(), fs::symlink_metadata(&path).unwrap().file_type());
            let mut names = vec![0; 4096];
            let length = rustix::fs::llistxattr(&path, &mut names).unwrap();
            let what = match () {
                () if kind.is_dir() => "directory".to_owned(),
                () if kind.is_symlink() => format!("to {:?}", fs::read_link(&path).unwrap()),
                () if kind.is_file() => format!("{} links: {:?}", status.nlink(), fs::read_to_string(&path).unwrap()),
                () if kind.is_fifo() => "fifo".to_owned(),
                () => format!("{kind:?} {}", status.rdev()),
            };
            let name = path.strip_prefix(top).unwrap().to_str().unwrap().to_owned();
            all.insert(name, format!("{what} {}", String::from_utf8_lossy(&names[..length])));
            if kind.is_dir() {
                walk(top, &path, all);
            }
        }
    }
    let mut all = BTreeMap::new();
    walk(top, top, &mut all);
    all
}

/// All recorded requests, once, with this crash each; returns the replies without node ids.
fn change_all(lives: &mut Lives, death: Death) -> Vec<Result<usize, i32>> {
    let low = lives.node("low");
    let mut answers = Vec::new();
    let mut ask = |lives: &mut Lives, parent: u64, op: Op<'_>| {
        // The kernel looks a name up before it is removed or moved.
        if let Op::Unlink { name } | Op::Rmdir { name } | Op::Rename { name, .. } = op {
            lives.carry_out(Death::None, parent, Op::Lookup { name }).unwrap();
        }
        let answer = lives.carry_out(death, parent, op);
        println!("{death:?} {op:?}: {:?}", answer.as_ref().map(Vec::len));
        answers.push(answer.as_ref().map(Vec::len).map_err(|error| *error));
        answer
    };
    let rename =
        |name: &'static [u8], new_name: &'static [u8], flags| Op::Rename { name, new_dir: low, new_name, flags };
    // The file below is hidden, and another file replaces it.
    for name in [&b"gone"[..], b"again", b"made", b"name", b"node", b"link", b"symlink"] {
        ask(lives, low, Op::Unlink { name }).unwrap();
    }
    let create = Op::Create { name: b"again", flags: CREATE | EXCL, mode: 0o644, umask: 0, open_flags: 0 };
    ask(lives, low, create).unwrap();
    ask(lives, low, Op::Mkdir { name: b"made", mode: 0o755, umask: 0 }).unwrap();
    ask(lives, low, Op::Symlink { name: b"name", target: b"elsewhere" }).unwrap();
    ask(lives, low, Op::Mknod { name: b"node", mode: 0o010_644, rdev: 0, umask: 0 }).unwrap();
    // Files are copied before they get another name.
    let linked = lives.node("low/linked");
    ask(lives, low, Op::Link { nodeid: linked, name: b"link" }).unwrap();
    ask(lives, low, rename(b"old", b"new", 0)).unwrap();
    ask(lives, low, rename(b"over", b"replaced", 0)).unwrap();
    ask(lives, low, rename(b"left", b"right", EXCHANGE)).unwrap();
    ask(lives, low, rename(b"new", b"again", 0)).unwrap();
    // Its content is hidden first.
    let directory = lives.node("low/dir");
    assert_eq!(ask(lives, low, Op::Rmdir { name: b"dir" }), Err(Errno::ENOTEMPTY.raw()));
    ask(lives, directory, Op::Unlink { name: b"x" }).unwrap();
    ask(lives, directory, Op::Unlink { name: b"y" }).unwrap();
    ask(lives, low, Op::Rmdir { name: b"dir" }).unwrap();
    ask(lives, low, Op::Rmdir { name: b"empty" }).unwrap();
    ask(lives, low, Op::Mkdir { name: b"dir", mode: 0o755, umask: 0 }).unwrap();
    // Programs copy it themselves where it is refused.
    let _ = ask(lives, low, rename(b"tree", b"wood", 0));
    let tagged = lives.node("low/tagged");
    let set = Op::Setxattr { name: b"user.x", value: b"1", flags: XATTR_CREATE, setxattr_flags: 0 };
    ask(lives, tagged, set).unwrap();
    let untagged = lives.node("low/untagged");
    ask(lives, untagged, Op::Removexattr { name: b"user.x" }).unwrap();
    // Open files.
    let log = lives.node("low/log");
    let opened = lives.carry_out(Death::None, log, Op::Open { flags: APPEND, open_flags: 0 }).unwrap();
    let fh = number(&opened, 0);
    for data in [&b" and"[..], b" more"] {
        ask(lives, log, Op::Write { fh, offset: 0, data, flags: APPEND, write_flags: 0, lock_owner: None }).unwrap();
    }
    let tmpfile = Op::Tmpfile { name: b"#1", flags: WRITE, mode: 0o600, umask: 0, open_flags: 0 };
    if let Ok(made) = ask(lives, low, tmpfile) {
        let (nodeid, fh) = (number(&made, 0), number(&made, 128));
        let write = Op::Write { fh, offset: 0, data: b"nameless", flags: WRITE, write_flags: 0, lock_owner: None };
        ask(lives, nodeid, write).unwrap();
        ask(lives, low, Op::Link { nodeid, name: b"named" }).unwrap();
    }
    answers
}

#[test]
fn branches_are_as_if_nobody_had_died() {
    let mut whole = Lives::over(LINE, fill);
    let below = listing(&whole.lower);
    let answers = change_all(&mut whole, Death::None);
    let changed = listing(&whole.source);
    assert!(changed.len() > 20, "{changed:?}");
    for death in Death::ALL {
        let mut lives = Lives::over(LINE, fill);
        assert_eq!(change_all(&mut lives, death), answers, "{death:?}");
        let now = listing(&lives.source);
        for name in changed.keys().chain(now.keys()) {
            assert_eq!(now.get(name), changed.get(name), "{death:?}: {name}");
        }
        assert_eq!(listing(&lives.lower), below);
    }
}

/// A request has copied the file up, and its process dies before the other steps; or another process has.
#[test]
fn what_a_copy_was_made_for_is_done() {
    let mut lives = Lives::over(LINE, fill);
    let low = lives.node("low");
    let copy = |lives: &Lives, name: &'static [u8]| {
        let parent = lives.door.inodes.node(low).unwrap();
        let entry = lives.layer.lookup(&Caller::ROOT, &parent, Name::new(name).unwrap()).unwrap();
        let file = lives.layer.open(&Caller::ROOT, &entry.node, OpenFlags(WRITE)).unwrap();
        file.write(&name[..1], 0, WriteOrigin::Caller).unwrap();
        assert!(lives.source.join("low").join(str::from_utf8(name).unwrap()).exists(), "it is copied");
    };
    let rename = |name, new_name, flags| Op::Rename { name, new_dir: low, new_name, flags };
    let set = Op::Setxattr { name: b"user.x", value: b"1", flags: XATTR_CREATE, setxattr_flags: 0 };
    let (linked, tagged, untagged) = (lives.node("low/linked"), lives.node("low/tagged"), lives.node("low/untagged"));
    let requests: [(u64, &'static [u8], Op<'static>); 7] = [
        (low, b"gone", Op::Unlink { name: b"gone" }),
        (low, b"old", rename(b"old", b"new", 0)),
        (low, b"over", rename(b"over", b"replaced", 0)),
        (low, b"left", rename(b"left", b"right", EXCHANGE)),
        (low, b"linked", Op::Link { nodeid: linked, name: b"also" }),
        (tagged, b"tagged", set),
        (untagged, b"untagged", Op::Removexattr { name: b"user.x" }),
    ];
    for (unique, (parent, name, op)) in (10..).step_by(2).zip(requests) {
        // The kernel looks a name up before it is removed or moved.
        lives.ask(unique + 1000, low, Op::Lookup { name }).unwrap();
        lives.begin(unique, parent, op);
        copy(&lives, name);
        lives.die();
        assert!(lives.ask(unique | abi::UNIQUE_RESEND, parent, op).is_ok(), "{op:?}");
    }
    let text = |name: &str| {
        let (parent, file) = (lives.door.inodes.node(low).unwrap(), Name::new(name.as_bytes()).unwrap());
        let entry = lives.layer.lookup(&Caller::ROOT, &parent, file).ok()?;
        let mut content = vec![0; 100];
        let read = lives.layer.open(&Caller::ROOT, &entry.node, OpenFlags(0)).unwrap().read(&mut content, 0).unwrap();
        Some(String::from_utf8(content[..read].to_vec()).unwrap())
    };
    let of = |name: &str| Some(format!("{name} of the branch below"));
    for gone in ["gone", "old", "over"] {
        assert_eq!(text(gone), None, "{gone}");
    }
    for (name, content) in
        [("new", "old"), ("replaced", "over"), ("left", "right"), ("right", "left"), ("also", "linked")]
    {
        assert_eq!(text(name), of(content), "{name}");
    }
    let tags = |name: &str| {
        let mut names = [0; 1000];
        let length = rustix::fs::llistxattr(lives.source.join("low").join(name), &mut names).unwrap();
        names[..length].windows(6).any(|window| window == b"user.x")
    };
    assert!(tags("tagged") && !tags("untagged"));
}

/// A file is created in a directory, which is copied up for that, while its removal is refused.
#[test]
fn a_directory_that_was_copied_meanwhile_is_not_taken_for_removed() {
    let mut lives = Lives::over(LINE, fill);
    let low = lives.node("low");
    let inner = lives.node("low/tree/in");
    let remove = Op::Rmdir { name: b"tree" };
    lives.begin(10, low, remove);
    let parent = lives.door.inodes.node(inner).unwrap();
    lives.layer.mkdir(&Caller::ROOT, &parent, Name::new(b"new").unwrap(), 0o755).unwrap();
    lives.die();
    assert_eq!(lives.ask(10 | abi::UNIQUE_RESEND, low, remove), Err(Errno::ENOTEMPTY.raw()));
}
