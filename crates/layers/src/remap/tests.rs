//! Tests of the filter as a whole: over a tree in memory, called like a FUSE front end does.

use super::{
    acl::tests::{NONE, acl},
    *,
};
use crate::{
    fakes::context,
    mem::Mem,
    settings::{ChangePolicy, CreateAs, RemapSpec, XattrPolicy},
};
use nacre_vfs::{
    DirEntry, DirSink, Entry, FileId, Filtered, Layer, Protection, RenameFlags, SetTime, Time, WriteOrigin, XattrFlags,
};

/// Attributes of a file of this type: mode 644, owner 0.
pub(crate) fn attr(kind: Kind) -> Attr {
    Attr {
        id: FileId { fs: 1, ino: 2, generation: 3 },
        kind,
        mode: 0o644,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev_major: 0,
        rdev_minor: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: Time::default(),
        mtime: Time { sec: 1, nsec: 0 },
        ctime: Time { sec: 2, nsec: 0 },
        btime: None,
        protection: Protection::None,
    }
}

fn rules(spec: &RemapSpec) -> Rules {
    Rules::new(spec, &context(0), &mut Vec::new()).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(spec: &RemapSpec) -> String {
    Rules::new(spec, &context(0), &mut Vec::new()).unwrap_err().to_string()
}

fn spec(change: impl FnOnce(&mut RemapSpec)) -> RemapSpec {
    let mut spec = RemapSpec::default();
    change(&mut spec);
    spec
}

const ALICE: Caller = Caller { uid: 1000, gid: 100, pid: 0, umask: 0o022 };

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

/// A tree, accessed directly and through rules.
struct Both {
    plain: Arc<Mem>,
    remap: Arc<Remap>,
    seen: Filtered<Remap>,
}

impl Both {
    fn new(change: impl FnOnce(&mut RemapSpec)) -> Both {
        let (plain, remap) = (Arc::new(Mem::new()), Arc::new(Remap::new(rules(&spec(change)))));
        Both { seen: Filtered::new(Arc::clone(&remap), Arc::clone(&plain) as _), plain, remap }
    }

    fn root(&self) -> nacre_vfs::Node {
        self.plain.root().unwrap().node
    }

    /// Creates a file in the lower tree.
    fn file(&self, text: &str, mode: u32, uid: u32, gid: u32) -> Entry {
        let caller = Caller { uid, gid, pid: 0, umask: 0 };
        self.plain.create(&caller, &self.root(), name(text), mode, OpenFlags::READ_WRITE).unwrap().0
    }

    fn make(&self, caller: &Caller, text: &str, mode: u32) -> (Attr, Attr) {
        let made = self.seen.create(caller, &self.root(), name(text), mode, OpenFlags::READ_WRITE).unwrap().0;
        (made.attr, self.plain.getattr(caller, &made.node, None).unwrap())
    }

    fn names(&self) -> Vec<String> {
        #[derive(Default)]
        struct Names(Vec<String>);
        impl DirSink for Names {
            fn push(&mut self, entry: DirEntry<'_>) -> bool {
                self.0.push(entry.name.to_string());
                true
            }
        }
        let mut names = Names::default();
        self.seen.readdir(&ALICE, &self.root(), 0, true, &mut names).unwrap();
        names.0
    }
}

fn shown(change: impl FnOnce(&mut RemapSpec), caller: Caller, mut attr: Attr) -> Attr {
    rules(&spec(change)).show(&caller, &mut attr).unwrap();
    attr
}

#[test]
fn a_stat_is_rewritten_in_the_documented_order() {
    let all = |spec: &mut RemapSpec| {
        spec.ctime_from_mtime = true;
        spec.map = Some("0/5".into());
        spec.force_group = Some("staff".into());
        spec.hide_hard_links = true;
        spec.perms = Some("a+w".into());
    };
    let file = shown(all, ALICE, attr(Kind::File));
    assert_eq!((file.uid, file.gid, file.nlink, file.mode, file.ctime.sec), (5, 50, 1, 0o666, 1));
    let both = shown(
        |spec| {
            spec.uid_offset = Some(10);
            spec.force_user = Some("alice".into());
        },
        ALICE,
        attr(Kind::File),
    );
    assert_eq!(both.uid, 1000, "a forced owner comes after the offset");
    let link = shown(|spec| spec.perms = Some("0".into()), ALICE, attr(Kind::Symlink));
    assert_eq!(link.mode, 0o644, "links are left alone");
}

#[test]
fn mirror_shows_everyone_as_owner_and_mirror_only_shuts_others_out() {
    let bob = Caller { uid: 1001, ..ALICE };
    let root = Caller { uid: 0, gid: 0, ..ALICE };
    let mirror = |spec: &mut RemapSpec| {
        spec.mirror = Some("alice".into());
        spec.force_user = Some("77".into());
    };
    assert_eq!(shown(mirror, ALICE, attr(Kind::File)).uid, 1000);
    assert_eq!(shown(mirror, bob, attr(Kind::File)).uid, 77);
    let only = |spec: &mut RemapSpec| {
        spec.mirror_only = Some("@staff".into());
        spec.hide_hard_links = true;
        spec.perms = Some("0777".into());
    };
    let carol = shown(only, Caller { uid: 1002, ..ALICE }, Attr { mode: 0o4755, ..attr(Kind::File) });
    assert_eq!((carol.mode, carol.nlink), (0o4000, 2), "the later steps are skipped");
    assert_eq!((shown(only, bob, attr(Kind::File)).uid, shown(only, bob, attr(Kind::File)).mode), (1001, 0o777));
    assert_eq!(shown(only, root, attr(Kind::File)).mode, 0o777, "root is never shut out");
    let both = Both::new(mirror);
    assert_eq!(both.seen.coherence(nacre_vfs::Scope::Names(&both.root())), Coherence::PerCaller);
    both.remap.replace(rules(&RemapSpec::default()));
    assert_eq!(both.seen.coherence(nacre_vfs::Scope::Names(&both.root())), Coherence::Exclusive);
}

#[test]
fn whom_mirror_only_shuts_out_gets_nowhere_whatever_mode_the_kernel_has_in_mind() {
    let both = Both::new(|spec| spec.mirror_only = Some("alice".into()));
    let node = both.file("f", 0o777, 0, 0).node;
    let outsider = Caller { uid: 1002, ..ALICE };
    let sees = |caller: &Caller| both.seen.lookup(caller, &both.root(), name("f")).map(drop);
    let opens = |caller: &Caller| both.seen.open(caller, &node, OpenFlags::READ).map(drop);
    for refused in [
        sees(&outsider),
        opens(&outsider),
        both.seen.create(&outsider, &both.root(), name("new"), 0o600, OpenFlags::WRITE).map(drop),
        both.seen.mkdir(&outsider, &both.root(), name("new"), 0o700).map(drop),
        both.seen.unlink(&outsider, &both.root(), name("f")),
        both.seen.rename(&outsider, &both.root(), name("f"), &both.root(), name("g"), RenameFlags::default()),
    ] {
        assert_eq!(refused, Err(Errno::EACCES));
    }
    for caller in [ALICE, Caller::ROOT] {
        assert_eq!((sees(&caller), opens(&caller)), (Ok(()), Ok(())));
    }
    assert_eq!(
        both.seen.getattr(&outsider, &node, None).map(|attr| attr.mode),
        Ok(0),
        "what the kernel needs to refuse by itself"
    );
}

#[test]
fn block_devices_show_their_size() {
    let device = |minor| Attr { rdev_major: 8, rdev_minor: minor, ..attr(Kind::Block) };
    let files = |spec: &mut RemapSpec| spec.block_devices_as_files = true;
    let shown_one = shown(files, ALICE, device(1));
    assert_eq!(
        (shown_one.kind, shown_one.size, shown_one.blocks, shown_one.rdev_major),
        (Kind::File, 1_000_001, 1954, 0)
    );
    assert_eq!(shown(files, ALICE, device(2)).size, 0);
    assert_eq!(shown(|_| {}, ALICE, device(1)).kind, Kind::Block);
}

#[test]
fn realistic_permissions_come_after_the_rules() {
    let spec = spec(|spec| {
        spec.realistic_permissions = true;
        spec.perms = Some("a=rwx".into());
    });
    let rules = Rules::new(&spec, &context(1000), &mut Vec::new()).unwrap();
    let mut file = Attr { uid: 1000, mode: 0o640, ..attr(Kind::File) };
    rules.show(&ALICE, &mut file).unwrap();
    assert_eq!(file.mode, 0o666);
}

#[test]
fn ids_that_cannot_be_shown_concern_one_file_only() {
    let both = Both::new(|spec| spec.uid_offset = Some(10));
    both.file("good", 0o644, 5, 5);
    both.file("bad", 0o644, u32::MAX - 3, 5);
    assert_eq!(both.names(), ["good", "bad"], "the listing goes on");
    assert_eq!(both.seen.lookup(&ALICE, &both.root(), name("good")).unwrap().attr.uid, 15);
    let bad = both.seen.lookup(&ALICE, &both.root(), name("bad")).unwrap().attr;
    assert_eq!((bad.uid, bad.gid), (super::owner::NOBODY, 5));
}

#[test]
fn new_objects_belong_to_whom_the_rules_say() {
    let owner = |change: fn(&mut RemapSpec), caller: Caller| {
        let (seen, below) = Both::new(change).make(&caller, "new", 0o666);
        ((seen.uid, seen.gid), (below.uid, below.gid))
    };
    assert_eq!(owner(|_| {}, ALICE), ((1000, 100), (1000, 100)));
    assert_eq!(owner(|spec| spec.map = Some("5/alice:@6/@users".into()), ALICE), ((1000, 100), (5, 6)));
    assert_eq!(
        owner(|spec| (spec.uid_offset, spec.gid_offset) = (Some(900), Some(-10)), ALICE),
        ((1000, 100), (100, 110))
    );
    assert_eq!(owner(|spec| spec.create_as = CreateAs::Mounter, ALICE), ((0, 0), (0, 0)));
    let for_user = |spec: &mut RemapSpec| {
        spec.create_for_user = Some("bob".into());
        spec.map = Some("5/bob:5000-5999/alice".into());
    };
    assert_eq!(owner(for_user, ALICE), ((1001, 100), (1001, 100)), "create-for beats the map");
    assert_eq!(owner(|spec| spec.force_user = Some("77".into()), ALICE), ((77, 100), (1000, 100)));
    assert_eq!(
        owner(|spec| spec.map = Some("2000-2999/alice".into()), ALICE),
        ((1000, 100), (2000, 100)),
        "the first of the range"
    );
    assert_eq!(
        owner(|spec| spec.map = Some("*/0".into()), ALICE),
        ((0, 100), (1000, 100)),
        "a star is not turned back"
    );
}

#[test]
fn create_for_group_wins_over_a_set_group_id_directory() {
    let both = Both::new(|spec| spec.create_for_group = Some("staff".into()));
    let parent =
        both.plain.mkdir(&Caller { gid: 7, umask: 0, ..Caller::ROOT }, &both.root(), name("sg"), 0o2777).unwrap().node;
    let (file, _) = both.seen.create(&ALICE, &parent, name("f"), 0o644, OpenFlags::WRITE).unwrap();
    let directory = both.seen.mkdir(&ALICE, &parent, name("d"), 0o755).unwrap();
    let (unnamed, _) = both.seen.tmpfile(&ALICE, &parent, 0o644, OpenFlags::WRITE).unwrap();
    let fifo = both.seen.mknod(&ALICE, &parent, name("p"), Kind::Fifo, 0o644, (0, 0)).unwrap();
    let link = both.seen.symlink(&ALICE, &parent, name("l"), b"f").unwrap();
    for made in [&file, &directory, &unnamed, &fifo, &link] {
        assert_eq!(
            (made.attr.gid, both.plain.getattr(&ALICE, &made.node, None).unwrap().gid),
            (50, 50),
            "{:?}",
            made.attr.kind
        );
    }
    assert_eq!(directory.attr.mode, 0o2755);
    // A creation that finds an existing file does not change it.
    let old = both.plain.create(&ALICE, &parent, name("old"), 0o644, OpenFlags::WRITE).unwrap().0;
    assert_eq!(both.seen.create(&ALICE, &parent, name("old"), 0o644, OpenFlags::WRITE).unwrap().0.attr.gid, 7);
    assert_eq!(both.plain.getattr(&ALICE, &old.node, None).unwrap().gid, 7);
    let exclusive = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::EXCL);
    assert_eq!(both.seen.create(&ALICE, &parent, name("old"), 0o644, exclusive).map(|_| ()), Err(Errno::EEXIST));
}

#[test]
fn an_unprivileged_mounter_creates_as_itself() {
    let rules = Rules::new(&RemapSpec::default(), &context(1000), &mut Vec::new()).unwrap();
    let mut caller = Caller { uid: 5, gid: 5, ..ALICE };
    rules.owner_of_new(&mut caller, &mut Creation { kind: Kind::File, mode: 0o644, group: None });
    assert_eq!((caller.uid, caller.gid), (1000, 1000));
}

#[test]
fn what_its_creator_cannot_own_is_the_mounters_without_his_power() {
    let both = Both::new(|spec| (spec.uid_offset, spec.gid_offset) = (Some(2000), Some(200)));
    let (seen, below) = both.make(&ALICE, "new", 0o6755);
    assert_eq!((below.uid, below.gid, below.mode), (0, 0, 0o755));
    assert_eq!((seen.uid, seen.gid), (2000, 200));
}

#[test]
fn who_is_not_the_owner_below_gives_no_set_id_bits() {
    let alice = |spec: &mut RemapSpec| spec.force_user = Some("alice".into());
    let staff = |spec: &mut RemapSpec| spec.force_group = Some("staff".into());
    let map = |spec: &mut RemapSpec| spec.map = Some("0/alice:@0/@100".into());
    let mirror = |spec: &mut RemapSpec| spec.mirror = Some("alice".into());
    let for_root = |spec: &mut RemapSpec| spec.create_for_user = Some("0".into());
    type Change = fn(&mut RemapSpec);
    // Mode after creation by the caller; then after chmod: of a created file, one of root's and one
    // of the caller's.
    let offset = |spec: &mut RemapSpec| (spec.uid_offset, spec.gid_offset) = (Some(1000), Some(100));
    let cases: [(Change, [u32; 4]); 7] = [
        (offset, [0o6755, 0o6755, 0o6755, 0o6755]),
        (|_| {}, [0o6755, 0o6755, 0o6755, 0o6755]),
        (alice, [0o6755, 0o6755, 0o755, 0o6755]),
        (staff, [0o4755, 0o6755, 0o755, 0o6755]),
        (map, [0o755, 0o755, 0o755, 0o6755]),
        (mirror, [0o6755, 0o6755, 0o755, 0o6755]),
        (for_root, [0o2755, 0o6755, 0o6755, 0o6755]),
    ];
    for (case, (change, expected)) in cases.into_iter().enumerate() {
        let both = Both::new(change);
        let (_, made) = both.make(&ALICE, "new", 0o6755);
        let mut modes = vec![made.mode];
        let new = both.plain.lookup(&ALICE, &both.root(), name("new")).unwrap();
        let others = [both.file("roots", 0o644, 0, 0), both.file("own", 0o644, 1000, 100)];
        for entry in [new].iter().chain(&others) {
            let set = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
            both.seen.setattr(&ALICE, &entry.node, None, &set).unwrap();
            modes.push(both.plain.getattr(&ALICE, &entry.node, None).unwrap().mode);
        }
        assert_eq!(modes, expected, "case {case}");
        let directory = both.plain.mkdir(&Caller::ROOT, &both.root(), name("d"), 0o755).unwrap();
        let set = SetAttr { mode: Some(0o2755), ..SetAttr::default() };
        both.seen.setattr(&ALICE, &directory.node, None, &set).unwrap();
        assert_eq!(both.plain.getattr(&ALICE, &directory.node, None).unwrap().mode, 0o2755, "it passes its group on");
    }
    // Root may, also together with a change of owner, in which case the new owner counts.
    let both = Both::new(alice);
    let file = both.file("roots", 0o644, 0, 0);
    let set = SetAttr { mode: Some(0o4755), ..SetAttr::default() };
    both.seen.setattr(&Caller::ROOT, &file.node, None, &set).unwrap();
    assert_eq!(both.plain.getattr(&ALICE, &file.node, None).unwrap().mode, 0o4755);
    both.seen.setattr(&ALICE, &file.node, None, &SetAttr { uid: Some(1000), ..set }).unwrap();
    assert_eq!(both.plain.getattr(&ALICE, &file.node, None).unwrap().mode, 0o4755);
    both.seen.setattr(&ALICE, &file.node, None, &SetAttr { uid: Some(0), ..set }).unwrap();
    assert_eq!(both.plain.getattr(&ALICE, &file.node, None).unwrap().mode, 0o755);
}

#[test]
fn create_with_perms_has_the_last_word() {
    let mode = |spec: &str, asked| {
        Both::new(|rules| rules.create_with_perms = Some(spec.to_owned())).make(&ALICE, "new", asked).1.mode
    };
    assert_eq!(mode("", 0o666), 0o644, "only the umask");
    assert_eq!(mode("a+w", 0o666), 0o666, "after the umask");
    assert_eq!(mode("g=u,o=", 0o666), 0o660);
    let both = Both::new(|spec| {
        spec.create_with_perms = Some("u+rwx".into());
        spec.for_types = vec!["d:create-with-perms=0750".into()];
    });
    let directory = both.seen.mkdir(&ALICE, &both.root(), name("d"), 0o1777).unwrap();
    assert_eq!(directory.attr.mode, 0o1750, "sticky stays, and the type decides");
}

#[test]
fn changes_of_owner_follow_the_policy() {
    let result = |change: fn(&mut RemapSpec), asked: SetAttr| {
        let both = Both::new(change);
        let file = both.file("f", 0o4755, 1000, 100);
        let seen = both.seen.setattr(&Caller::ROOT, &file.node, None, &asked);
        let below = both.plain.getattr(&Caller::ROOT, &file.node, None).unwrap();
        (seen.map(|attr| (attr.uid, attr.gid)), (below.uid, below.gid, below.mode))
    };
    let chown = SetAttr { uid: Some(7), gid: Some(8), kill_privileges: true, ..SetAttr::default() };
    assert_eq!(result(|_| {}, chown), (Ok((7, 8)), (7, 8, 0o755)));
    assert_eq!(result(|spec| spec.map = Some("3/7:@4/@8".into()), chown), (Ok((7, 8)), (3, 4, 0o755)));
    assert_eq!(result(|spec| (spec.uid_offset, spec.gid_offset) = (Some(2), Some(-2)), chown).1, (5, 10, 0o755));
    assert_eq!(result(|spec| spec.chown = ChangePolicy::Ignore, chown).1, (1000, 8, 0o755), "ignore drops its half");
    assert_eq!(
        result(|spec| spec.chgrp = ChangePolicy::Deny, chown),
        (Err(Errno::EPERM), (1000, 100, 0o4755)),
        "deny fails the whole"
    );
    let both_ignored = |spec: &mut RemapSpec| (spec.chown, spec.chgrp) = (ChangePolicy::Ignore, ChangePolicy::Ignore);
    assert_eq!(result(both_ignored, chown), (Ok((1000, 100)), (1000, 100, 0o4755)), "nothing happens at all");
    assert_eq!(
        result(|spec| spec.force_user = Some("9".into()), chown),
        (Ok((9, 8)), (7, 8, 0o755)),
        "force-user does not stop chown"
    );
}

#[test]
fn changes_of_mode_follow_the_policy() {
    let result = |change: &dyn Fn(&mut RemapSpec), kind: Kind, before: u32, asked: u32| {
        let both = Both::new(change);
        let file = match kind {
            Kind::Directory => both.plain.mkdir(&Caller::ROOT, &both.root(), name("f"), before).unwrap(),
            _ => both.file("f", before, 0, 0),
        };
        let change = SetAttr { mode: Some(asked), ..SetAttr::default() };
        let seen = both.seen.setattr(&Caller::ROOT, &file.node, None, &change).map(|_| ());
        (seen, both.plain.getattr(&Caller::ROOT, &file.node, None).unwrap().mode)
    };
    let (ignore, deny) = (ChangePolicy::Ignore, ChangePolicy::Deny);
    let policy = |chmod, allow_x| {
        move |spec: &mut RemapSpec| {
            spec.chmod = chmod;
            spec.chmod_allow_x = allow_x;
        }
    };
    assert_eq!(result(&|_| {}, Kind::File, 0o644, 0o4600), (Ok(()), 0o4600));
    assert_eq!(result(&|spec| spec.chmod_filter = Some("g-w,o=".into()), Kind::File, 0o644, 0o1777), (Ok(()), 0o1750));
    assert_eq!(result(&policy(ignore, false), Kind::File, 0o644, 0o777), (Ok(()), 0o644));
    assert_eq!(result(&policy(deny, false), Kind::File, 0o644, 0o645), (Err(Errno::EPERM), 0o644));
    assert_eq!(result(&policy(ignore, true), Kind::File, 0o644, 0o4777), (Ok(()), 0o755));
    assert_eq!(result(&policy(ignore, true), Kind::Directory, 0o644, 0o777), (Ok(()), 0o644));
    assert_eq!(result(&policy(deny, true), Kind::File, 0o644, 0o755), (Ok(()), 0o755));
    assert_eq!(result(&policy(deny, true), Kind::File, 0o755, 0o644), (Ok(()), 0o644));
    assert_eq!(result(&policy(deny, true), Kind::File, 0o644, 0o777), (Err(Errno::EPERM), 0o644));
    assert_eq!(result(&policy(deny, true), Kind::Directory, 0o755, 0o644), (Err(Errno::EPERM), 0o755));
    let times = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    let both = Both::new(policy(deny, false));
    let file = both.file("t", 0o644, 0, 0);
    assert!(both.seen.setattr(&Caller::ROOT, &file.node, None, &times).is_ok(), "times are no mode");
}

#[test]
fn deletion_rename_and_truncation_can_be_denied() {
    let both = Both::new(|spec| spec.delete_deny = true);
    both.file("a", 0o644, 0, 0);
    both.file("b", 0o644, 0, 0);
    let rename = |both: &Both, from: &str, to: &str, flags| {
        both.seen.rename(&ALICE, &both.root(), name(from), &both.root(), name(to), RenameFlags(flags))
    };
    assert_eq!(both.seen.unlink(&ALICE, &both.root(), name("a")), Err(Errno::EPERM));
    both.plain.mkdir(&ALICE, &both.root(), name("d"), 0o755).unwrap();
    assert_eq!(both.seen.rmdir(&ALICE, &both.root(), name("d")), Err(Errno::EPERM));
    assert_eq!(rename(&both, "a", "b", 0), Ok(()), "delete-deny alone lets a rename replace");

    let both = Both::new(|spec| spec.replace_deny = true);
    both.file("a", 0o644, 0, 0);
    both.file("b", 0o644, 0, 0);
    assert_eq!(rename(&both, "a", "b", 0), Err(Errno::EPERM));
    assert_eq!(rename(&both, "a", "b", RenameFlags::NOREPLACE), Err(Errno::EEXIST));
    assert_eq!(rename(&both, "a", "b", RenameFlags::EXCHANGE), Ok(()), "nothing is lost");
    assert_eq!(rename(&both, "a", "c", 0), Ok(()));

    let both = Both::new(|spec| spec.rename_deny = true);
    both.file("a", 0o644, 0, 0);
    assert_eq!(rename(&both, "a", "b", 0), Err(Errno::EPERM));
}

#[test]
fn no_way_cuts_a_file_where_that_is_denied() {
    let both = Both::new(|spec| spec.truncate_deny = true);
    let truncating = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNC);
    let (made, file) = both.seen.create(&ALICE, &both.root(), name("f"), 0o644, truncating).unwrap();
    file.write(b"precious", 0, WriteOrigin::Caller).unwrap();
    let size = |size| both.seen.setattr(&ALICE, &made.node, None, &SetAttr { size: Some(size), ..SetAttr::default() });
    assert_eq!(size(7).unwrap_err(), Errno::EPERM);
    assert_eq!(size(9).unwrap().size, 9);
    assert_eq!(both.seen.open(&ALICE, &made.node, truncating).map(|_| ()), Err(Errno::EPERM));
    assert!(both.seen.open(&ALICE, &made.node, OpenFlags::READ_WRITE).is_ok());
    // A creation that finds an existing file opens it unchanged.
    assert!(both.seen.create(&ALICE, &both.root(), name("f"), 0o644, truncating).is_ok());
    assert_eq!(both.plain.getattr(&ALICE, &made.node, None).unwrap().size, 9);
    // Collapsing, punching, zeroing.
    for mode in [0x08, 0x03, 0x10, 0x11] {
        assert_eq!(file.allocate(AllocateMode(mode), 0, 4096), Err(Errno::EPERM), "{mode:#x}");
    }
    assert_eq!(file.allocate(AllocateMode(0), 0, 4096), Ok(()));
    let empty = both.file("empty", 0o644, 0, 0);
    assert!(both.seen.open(&ALICE, &empty.node, truncating).is_ok(), "there is nothing to lose");
}

#[test]
fn hidden_names_are_not_there() {
    let both = Both::new(|spec| spec.hide = vec!["*.tmp".into(), ".git".into()]);
    for made in ["a", "b.tmp", ".git"] {
        both.file(made, 0o644, 0, 0);
    }
    assert_eq!(both.names(), ["a"]);
    let (root, hidden) = (both.root(), name("b.tmp"));
    assert_eq!(both.seen.lookup(&ALICE, &root, hidden).unwrap_err(), Errno::ENOENT);
    assert_eq!(both.seen.unlink(&ALICE, &root, hidden), Err(Errno::ENOENT));
    assert_eq!(both.seen.mkdir(&ALICE, &root, name("new.tmp"), 0o755).unwrap_err(), Errno::EACCES);
    assert_eq!(both.seen.rename(&ALICE, &root, name("a"), &root, hidden, RenameFlags(0)), Err(Errno::EACCES));
    both.remap.replace(rules(&RemapSpec::default()));
    assert_eq!(both.names().len(), 3, "other rules hold at once");
}

#[test]
fn acls_are_translated_both_ways_and_obey_permission_rules() {
    let both = Both::new(|spec| {
        spec.map = Some("1000/2000:@100/@200".into());
        spec.perms = Some("a-w".into());
    });
    let file = both.file("f", 0o664, 0, 0);
    let entries = |perm, user, group| {
        acl(&[(1, perm, NONE), (2, perm, user), (4, 4, NONE), (8, 4, group), (16, perm, NONE), (32, 4, NONE)])
    };
    both.seen.setxattr(&ALICE, &file.node, acl::ACCESS, &entries(6, 2000, 200), XattrFlags::default()).unwrap();
    let read = |layer: &dyn Layer| {
        let mut buffer = [0; 200];
        let size = layer.getxattr(&ALICE, &file.node, acl::ACCESS, &mut buffer).unwrap();
        assert_eq!(layer.getxattr(&ALICE, &file.node, acl::ACCESS, &mut []), Ok(size));
        buffer[..size].to_vec()
    };
    assert_eq!(read(&*both.plain), entries(6, 1000, 100));
    assert_eq!(read(&both.seen), entries(4, 2000, 200));
    let mode = both.seen.getattr(&ALICE, &file.node, None).unwrap().mode;
    assert_eq!(acl::mode(&read(&both.seen)), Ok(Some(mode)), "ACL and mode agree");
    let bad = both.seen.setxattr(&ALICE, &file.node, acl::ACCESS, b"nonsense", XattrFlags::default());
    assert_eq!(bad, Err(Errno::EINVAL));
}

#[test]
fn acls_obey_the_policy_for_modes() {
    let set = |change: fn(&mut RemapSpec), key: &[u8]| {
        let both = Both::new(change);
        let made = both.plain.mkdir(&Caller::ROOT, &both.root(), name("d"), 0o777).unwrap();
        let value = acl(&[(1, 7, NONE), (2, 7, 5), (4, 7, NONE), (16, 7, NONE), (32, 7, NONE)]);
        let result = both.seen.setxattr(&ALICE, &made.node, key, &value, XattrFlags::default());
        (result, both.plain.getattr(&ALICE, &made.node, None).unwrap().mode)
    };
    assert_eq!(set(|spec| spec.chmod = ChangePolicy::Deny, acl::ACCESS), (Err(Errno::EPERM), 0o777));
    assert_eq!(set(|spec| spec.chmod = ChangePolicy::Ignore, acl::ACCESS), (Err(Errno::EOPNOTSUPP), 0o777));
    assert_eq!(set(|spec| spec.chmod = ChangePolicy::Deny, acl::DEFAULT), (Ok(()), 0o777));
    assert_eq!(set(|spec| spec.chmod_filter = Some("g-w,o=".into()), acl::ACCESS), (Ok(()), 0o750));
}

#[test]
fn extended_attributes_follow_the_policy() {
    let all = |policy| {
        let both = Both::new(|spec| spec.xattr = policy);
        let file = both.file("f", 0o644, 0, 0);
        both.plain.setxattr(&ALICE, &file.node, b"user.a", b"1", XattrFlags::default()).unwrap();
        let mut buffer = [0; 16];
        [
            both.seen.getxattr(&ALICE, &file.node, b"user.a", &mut buffer).map(|_| ()),
            both.seen.listxattr(&ALICE, &file.node, &mut buffer).map(|_| ()),
            both.seen.setxattr(&ALICE, &file.node, b"user.b", b"1", XattrFlags::default()),
            both.seen.removexattr(&ALICE, &file.node, b"user.a"),
        ]
    };
    assert_eq!(all(XattrPolicy::Rw), [Ok(()); 4]);
    assert_eq!(all(XattrPolicy::Ro), [Ok(()), Ok(()), Err(Errno::EACCES), Err(Errno::EACCES)]);
    assert_eq!(all(XattrPolicy::None), [Err(Errno::EOPNOTSUPP); 4]);
    assert!(!Both::new(|spec| spec.xattr = XattrPolicy::None).seen.capabilities().acls);
}

#[test]
fn rules_for_types_override_the_general_ones() {
    let rules = |spec: &mut RemapSpec| {
        spec.perms = Some("0600".into());
        spec.force_user = Some("alice".into());
        spec.for_types = vec!["d:perms=0755".into(), "lbcps:force-user=bob".into(), "f:force-group=50".into()];
    };
    let kind = |kind| shown(rules, ALICE, attr(kind));
    assert_eq!((kind(Kind::File).mode, kind(Kind::File).uid, kind(Kind::File).gid), (0o600, 1000, 50));
    assert_eq!((kind(Kind::Directory).mode, kind(Kind::Directory).uid), (0o755, 1000));
    assert_eq!((kind(Kind::Symlink).mode, kind(Kind::Symlink).uid), (0o644, 1001));
}

#[test]
fn nonsense_is_refused_with_the_setting_named() {
    type Change = fn(&mut RemapSpec);
    let cases: [(Change, &[&str]); 22] = [
        (|s| s.force_user = Some("nobody-here".into()), &["force-user", "nobody-here"]),
        (|s| s.force_user = Some(String::new()), &["force-user", "empty name"]),
        (|s| s.force_group = Some("4294967295".into()), &["force-group", "too large"]),
        (|s| s.perms = Some("a+r,8".into()), &["perms", "\"8\"", "0 to 7"]),
        (|s| s.create_with_perms = Some("x".into()), &["create-with-perms"]),
        (|s| s.mirror = Some("@nogroup-here".into()), &["mirror", "nogroup-here"]),
        (|s| (s.mirror, s.mirror_only) = (Some("0".into()), Some("0".into())), &["mirror and mirror-only"]),
        (|s| s.map = Some("1/2:3".into()), &["map", "\"3\""]),
        (|s| s.map = Some("1/2::3/4".into()), &["map", "no /"]),
        (|s| s.map = Some("@1/2".into()), &["map", "@FROM/@TO"]),
        (|s| s.map = Some("1/@2".into()), &["map", "@2"]),
        (|s| s.map = Some("1/5:2/5".into()), &["map", "user", "1+2/5"]),
        (|s| s.map = Some("@1/@5:@2/@5".into()), &["map", "group"]),
        (|s| (s.map, s.uid_offset) = (Some("1/2".into()), Some(1)), &["map and uid-offset"]),
        (|s| s.map_passwd = Some("/no/such/file".into()), &["map-passwd", "/no/such/file"]),
        (|s| s.hide = vec!["a/b".into()], &["hide", "slash"]),
        (|s| s.for_types = vec!["x:perms=0".into()], &["for", "find -type"]),
        (|s| s.for_types = vec!["d:colour=0".into()], &["for", "colour", "force-user"]),
        (|s| s.for_types = vec!["d".into()], &["for", "TYPES:KEY=VALUE"]),
        (|s| s.for_types = vec![":perms=0".into()], &["for", "TYPES:KEY=VALUE"]),
        (|s| s.for_types = vec!["fl:perms=0".into()], &["for", "symbolic links"]),
        (|s| s.for_types = vec!["f:perms=9".into()], &["for", "perms", "\"9\""]),
    ];
    for (change, parts) in cases {
        let error = refusal(&spec(change));
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn some_settings_need_root() {
    type Change = fn(&mut RemapSpec);
    let needing: [Change; 8] = [
        |s| s.map = Some("1/2".into()),
        |s| s.map_passwd = Some("/etc/passwd".into()),
        |s| s.map_group_rev = Some("/etc/group".into()),
        |s| s.uid_offset = Some(0),
        |s| s.create_as = CreateAs::User,
        |s| s.create_for_user = Some("0".into()),
        |s| s.create_for_group = Some("0".into()),
        |s| s.for_types = vec!["f:create-for-user=0".into()],
    ];
    for change in needing {
        let error = Rules::new(&spec(change), &context(1000), &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("root"), "{error}");
    }
    let free = spec(|spec| {
        spec.force_user = Some("root".into());
        spec.perms = Some("a+r".into());
        spec.mirror = Some("alice".into());
    });
    assert!(Rules::new(&free, &context(1000), &mut Vec::new()).is_ok());
}

#[test]
fn maps_from_files_join_the_map() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "alice:x:501:20:::\nghost:x:502:20:::\n").unwrap();
    let mut warnings = Vec::new();
    let with = spec(|spec| {
        spec.map_passwd = Some(file.path().to_owned());
        spec.map = Some("7/8".into());
    });
    let rules = Rules::new(&with, &context(0), &mut warnings).unwrap();
    assert_eq!([501, 502, 7].map(|id| rules.owners.users.shown(id)), [Some(1000), Some(502), Some(8)]);
    assert!(warnings.iter().any(|warning| warning.contains("ghost")), "{warnings:?}");
}
