//! Unions of several writable branches whose process dies between any two steps of a request: the same request,
//! carried out by the next process, gets the right reply, and the tree is the one without a crash.

use super::lives::{Lives, number};
use fusewire::{
    Op,
    abi::{self, SetattrIn, fattr},
};
use nacre_layers::host::{Host, HostOptions};
use nacre_testkit::{
    World,
    faulty::{Fault, Faulty},
    model::{Leaf, Tree, tree},
};
use nacre_union::{BranchMode, Member, Style, Union, UnionOptions, Words};
use nacre_vfs::{Errno, Layer};
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// From the top down.
const BRANCHES: [(&str, &str); 4] = [("first", "rw"), ("second", "rw"), ("third", "rw"), ("last", "ro")];
const EXCHANGE: u32 = 2;
const NOREPLACE: u32 = 1;
const CREATE: u32 = 0o302;
const APPEND: u32 = 0o2002;
/// `XATTR_CREATE`.
const XATTR_CREATE: u32 = 1;
/// Far more than any request takes.
const STEPS_MAX: i64 = 400;

/// Files on the branches; files in `empty` directories only create these directories.
const FILES: &[(&str, &[&str])] = &[
    ("first", &["above", "spread/one", "merged/one", "own/in/one", "replaced/sub/.keep", "every", "empty/.keep"]),
    ("first", &["copies/p", "copies/q"]),
    ("second", &["middle", "spread/two", "second/two", "under", "empty/.keep", "linked", "every", "left"]),
    ("second", &["copies/p", "copies/q", "copies/r"]),
    ("third", &["spread/three", "spread/sub/three", "right", "empty/.keep", "beside", "third/three"]),
    ("third", &["copies/p", "copies/r", "copies/s"]),
    ("last", &["low", "hidden", "merged/low", "merged/sub/low", "lower/low", "every", "lower-linked", "gone/low"]),
];

fn fill(place: &Path) {
    for (branch, files) in FILES {
        for name in *files {
            let path = place.join(branch).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match name.strip_suffix("/.keep") {
                Some(_) => {}
                None => fs::write(&path, format!("{name} of {branch}")).unwrap(),
            }
        }
    }
    fs::write(place.join("first/.wh.hidden"), "").unwrap();
    fs::write(place.join("first/.wh.gone"), "").unwrap();
    for (branch, name) in [("second", "linked"), ("last", "lower-linked")] {
        let branch = place.join(branch);
        fs::hard_link(branch.join(name), branch.join(format!("{name}-too"))).unwrap();
    }
    let tagged = place.join("last/low");
    rustix::fs::setxattr(&tagged, "user.tag", b"1", rustix::fs::XattrFlags::empty()).unwrap();
}

/// The files of a request, which the kernel looks up before it sends it.
type Make = fn(&mut Lives) -> (u64, Op<'static>);

fn rename(lives: &mut Lives, from: (&str, &'static str), to: (&str, &'static str), flags: u32) -> (u64, Op<'static>) {
    let (old, new_dir) = (lives.node(from.0), lives.node(to.0));
    (old, Op::Rename { name: from.1.as_bytes(), new_dir, new_name: to.1.as_bytes(), flags })
}

fn at_the_top(lives: &mut Lives, from: &'static str, to: &'static str) -> (u64, Op<'static>) {
    rename(lives, ("", from), ("", to), 0)
}

fn exchange(lives: &mut Lives, from: &'static str, to: &'static str) -> (u64, Op<'static>) {
    rename(lives, ("", from), ("", to), EXCHANGE)
}

fn unlink(name: &'static str) -> (u64, Op<'static>) {
    (1, Op::Unlink { name: name.as_bytes() })
}

fn rmdir(name: &'static str) -> (u64, Op<'static>) {
    (1, Op::Rmdir { name: name.as_bytes() })
}

fn mkdir(name: &'static str) -> (u64, Op<'static>) {
    (1, Op::Mkdir { name: name.as_bytes(), mode: 0o755, umask: 0 })
}

fn create(parent: u64, name: &'static str) -> (u64, Op<'static>) {
    (parent, Op::Create { name: name.as_bytes(), flags: CREATE, mode: 0o644, umask: 0, open_flags: 0 })
}

fn link(lives: &mut Lives, of: &str, parent: &str, name: &'static str) -> (u64, Op<'static>) {
    let nodeid = lives.node(of);
    (lives.node(parent), Op::Link { nodeid, name: name.as_bytes() })
}

fn set(lives: &mut Lives, path: &str, change: SetattrIn) -> (u64, Op<'static>) {
    (lives.node(path), Op::Setattr(change))
}

const MODE: SetattrIn = SetattrIn {
    valid: fattr::MODE,
    mode: 0o600,
    padding: 0,
    fh: 0,
    size: 0,
    lock_owner: 0,
    atime: 0,
    mtime: 0,
    ctime: 0,
    atimensec: 0,
    mtimensec: 0,
    ctimensec: 0,
    unused4: 0,
    uid: 0,
    gid: 0,
    unused5: 0,
};
const SIZE: SetattrIn = SetattrIn { valid: fattr::SIZE, size: 2, ..MODE };

const REQUESTS: &[(&str, Make)] = &[
    ("rename of a directory of three branches", |lives| at_the_top(lives, "spread", "new")),
    ("the same to another directory", |lives| rename(lives, ("", "spread"), ("own", "new"), 0)),
    ("the same without replacing", |lives| rename(lives, ("", "spread"), ("own", "new"), NOREPLACE)),
    ("the same over an empty one", |lives| at_the_top(lives, "spread", "empty")),
    ("rename of a directory of an upper and the last branch", |lives| at_the_top(lives, "merged", "new")),
    ("rename of a directory of the last branch", |lives| at_the_top(lives, "lower", "new")),
    ("rename of a directory of the second branch", |lives| at_the_top(lives, "second", "new")),
    ("the same over an empty one", |lives| at_the_top(lives, "second", "empty")),
    ("the same over a hidden one", |lives| at_the_top(lives, "second", "gone")),
    ("rename of a file of the first branch", |lives| at_the_top(lives, "above", "new")),
    ("the same over one of the second", |lives| at_the_top(lives, "above", "middle")),
    ("the same over one of the last", |lives| at_the_top(lives, "above", "low")),
    ("rename of a file of the second branch", |lives| at_the_top(lives, "middle", "new")),
    ("the same over one of the first", |lives| at_the_top(lives, "middle", "above")),
    ("the same into a directory of the first", |lives| rename(lives, ("", "middle"), ("own/in", "one"), 0)),
    ("the same over one of the third", |lives| at_the_top(lives, "middle", "beside")),
    ("the same over a hidden one", |lives| at_the_top(lives, "middle", "hidden")),
    ("the same over one of three branches", |lives| at_the_top(lives, "middle", "every")),
    ("rename of a file of the third branch over one of the second", |lives| at_the_top(lives, "beside", "middle")),
    ("rename of a linked file over one of the first", |lives| at_the_top(lives, "linked", "above")),
    ("rename of a linked file over its other name's", |lives| at_the_top(lives, "above", "linked-too")),
    ("rename of a file of the last branch", |lives| at_the_top(lives, "low", "new")),
    ("the same over one of the first", |lives| at_the_top(lives, "low", "above")),
    ("the same over one of the second", |lives| at_the_top(lives, "low", "middle")),
    ("rename of a linked file of the last branch", |lives| at_the_top(lives, "lower-linked", "new")),
    ("the same over one of the second", |lives| at_the_top(lives, "lower-linked", "middle")),
    ("rename of a file of three branches", |lives| at_the_top(lives, "every", "new")),
    ("the same over one of the second", |lives| at_the_top(lives, "every", "middle")),
    ("exchange of files of two branches", |lives| exchange(lives, "left", "right")),
    ("exchange with a file of the last", |lives| exchange(lives, "low", "above")),
    ("exchange of a file and a directory", |lives| exchange(lives, "above", "merged")),
    ("exchange of directories", |lives| exchange(lives, "spread", "own")),
    ("unlink of a file of the first branch", |_| unlink("above")),
    ("unlink of a file of the second", |_| unlink("middle")),
    ("unlink of a file of the last", |_| unlink("low")),
    ("unlink of a file of three", |_| unlink("every")),
    ("unlink of a name of a linked file", |_| unlink("linked")),
    ("unlink of a name of a linked file of the last", |_| unlink("lower-linked")),
    ("rmdir of a directory of three branches", |_| rmdir("empty")),
    ("rmdir of a directory with something in it", |_| rmdir("merged")),
    ("create", |_| create(1, "new")),
    ("create over a whiteout", |_| create(1, "hidden")),
    ("create in a directory of the last branch", |lives| create(lives.node("lower"), "new")),
    ("create in a directory of the third branch", |lives| create(lives.node("third"), "new")),
    ("mkdir", |_| mkdir("new")),
    ("mkdir over a whiteout", |_| mkdir("hidden")),
    ("mkdir over a hidden directory", |_| mkdir("gone")),
    ("symlink over a whiteout", |_| (1, Op::Symlink { name: b"hidden", target: b"elsewhere" })),
    ("mknod over a whiteout", |_| (1, Op::Mknod { name: b"hidden", mode: 0o010_644, rdev: 0, umask: 0 })),
    ("link of a file of the second branch", |lives| link(lives, "middle", "", "new")),
    ("link of a file of the last", |lives| link(lives, "low", "", "new")),
    ("link of a file of the last over a whiteout", |lives| link(lives, "low", "", "hidden")),
    ("link of a file of the second over a whiteout above", |lives| link(lives, "middle", "", "hidden")),
    ("link of a linked file of the last", |lives| link(lives, "lower-linked", "own", "new")),
    ("mode of a file of the second branch", |lives| set(lives, "middle", MODE)),
    ("mode of a file of the last", |lives| set(lives, "merged/sub/low", MODE)),
    ("mode of a linked file of the last", |lives| set(lives, "lower-linked", MODE)),
    ("mode of a directory of three branches", |lives| set(lives, "spread", MODE)),
    ("mode of a directory of the last", |lives| set(lives, "merged/sub", MODE)),
    ("length of a file of the last", |lives| set(lives, "low", SIZE)),
    ("an attribute of a file of the last", |lives| {
        (lives.node("low"), Op::Setxattr { name: b"user.new", value: b"1", flags: XATTR_CREATE, setxattr_flags: 0 })
    }),
    ("an attribute of a directory of three", |lives| {
        (lives.node("spread"), Op::Setxattr { name: b"user.new", value: b"1", flags: XATTR_CREATE, setxattr_flags: 0 })
    }),
    ("an attribute less", |lives| (lives.node("low"), Op::Removexattr { name: b"user.tag" })),
    ("append to a file of the last branch", |lives| {
        let nodeid = lives.node("low");
        let opened = lives.carry_out(super::lives::Death::None, nodeid, Op::Open { flags: APPEND, open_flags: 0 });
        let fh = number(&opened.unwrap(), 0);
        (nodeid, Op::Write { fh, offset: 0, data: b" and more", flags: APPEND, write_flags: 0, lock_owner: None })
    }),
];

fn of_copies(lives: &mut Lives, from: &'static str, to: &'static str, flags: u32) -> (u64, Op<'static>) {
    rename(lives, ("copies", from), ("copies", to), flags)
}

/// Renames in a union that changes the copies of files with them.
const OF_COPIES: &[(&str, Make)] = &[
    ("rename of a file with two copies", |lives| of_copies(lives, "p", "new", 0)),
    ("the same to another directory", |lives| rename(lives, ("copies", "p"), ("spread", "new"), 0)),
    ("the same over one with a copy", |lives| of_copies(lives, "p", "q", 0)),
    ("rename of a file with a copy over one with two", |lives| of_copies(lives, "q", "p", 0)),
    ("rename of a file of lower branches over one of all", |lives| of_copies(lives, "r", "p", 0)),
    ("rename of a file without copies over one of all", |lives| of_copies(lives, "s", "p", 0)),
    ("rename of a file over one of lower branches", |lives| of_copies(lives, "q", "r", 0)),
    ("exchange of files with copies", |lives| of_copies(lives, "p", "q", EXCHANGE)),
    ("exchange of files of two branches with copies", |lives| of_copies(lives, "r", "p", EXCHANGE)),
    ("exchange with a file without copies", |lives| of_copies(lives, "s", "q", EXCHANGE)),
    ("rename of a directory over an empty one", |lives| at_the_top(lives, "spread", "empty")),
];

fn changing_copies() -> UnionOptions {
    let words = Words::parse(OsStr::new("category.create=ff,duplicates=change")).unwrap();
    UnionOptions { sync: false, ..words.options }
}

/// The files of the writable branches, without the union's own directories.
fn on_branches(place: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut waiting: Vec<_> = BRANCHES[..3].iter().map(|(name, _)| place.join(name)).collect();
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with(".wh..wh.work") || path.ends_with(".wh..wh.links") {
                continue;
            }
            let is_directory = path.is_dir();
            let content = if is_directory { Vec::new() } else { fs::read(&path).unwrap() };
            all.insert(path.strip_prefix(place).unwrap().display().to_string(), content);
            if is_directory {
                waiting.push(path);
            }
        }
    }
    all
}

/// A union that is served by one process after the other, and the names that the kernel knows.
struct Scene {
    place: PathBuf,
    lives: Lives,
    fault: Arc<Fault>,
    known: BTreeMap<String, u64>,
}

impl Scene {
    fn new(options: &UnionOptions) -> Scene {
        let place = tempfile::tempdir().unwrap();
        BRANCHES.iter().for_each(|(name, _)| fs::create_dir(place.path().join(name)).unwrap());
        fill(place.path());
        let fault = Fault::new(Errno::EIO, true);
        let (path, options, strikes) = (place.path().to_owned(), options.clone(), Arc::clone(&fault));
        let top = path.clone();
        let mut lives = Lives::made_by(
            place,
            Box::new(move |numbers| {
                let members = BRANCHES.iter().map(|(name, mode)| member(&top.join(name), mode, &strikes)).collect();
                Arc::new(Union::going_on(members, options.clone(), Some(numbers)).unwrap())
            }),
        );
        let names = World::new(Arc::clone(&lives.layer));
        let known: Vec<String> =
            tree(&names).keys().map(|path| String::from_utf8(path[1..].to_vec()).unwrap()).collect();
        let known = known.into_iter().map(|path| (path.clone(), lives.node(&path))).collect();
        Scene { place: path, lives, fault, known }
    }

    fn tree(&self) -> Tree {
        tree(&World::new(Arc::clone(&self.lives.layer)))
    }

    /// The kernel's state of each file that it knows.
    fn known(&mut self) -> BTreeMap<String, Result<(), i32>> {
        let lives = &mut self.lives;
        let asked = self.known.iter().map(|(path, nodeid)| {
            let attributes = lives.carry_out(super::lives::Death::None, *nodeid, Op::Getattr { fh: None });
            (path.clone(), attributes.map(drop))
        });
        asked.collect()
    }
}

fn member(path: &Path, mode: &str, fault: &Arc<Fault>) -> Member {
    let host = Arc::new(Host::open(HostOptions::new(path)).unwrap()) as Arc<dyn Layer>;
    let layer = Arc::new(Faulty { below: host, fault: Arc::clone(fault) }) as Arc<dyn Layer>;
    Member { name: path.to_owned(), layer, mode: BranchMode::parse(mode).unwrap(), work: None, lock: None }
}

/// When the process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// Not before the request is answered.
    Never,
    /// Before the request is made.
    Before,
    /// After so many steps of it.
    After(i64),
}

/// Result of a request.
#[derive(Debug)]
struct Outcome {
    answer: Result<(), i32>,
    tree: Tree,
    known: BTreeMap<String, Result<(), i32>>,
    tree_later: Tree,
    known_later: BTreeMap<String, Result<(), i32>>,
    /// Files of the branches, where the union changes copies.
    on_branches: BTreeMap<String, Vec<u8>>,
}

/// Carries out a request in a new scene; none where it was over before that many steps.
fn carried_out(options: &UnionOptions, make: Make, moment: Moment) -> Option<Outcome> {
    let mut scene = Scene::new(options);
    let (nodeid, op) = make(&mut scene.lives);
    if moment == Moment::Before {
        scene.lives.die();
    }
    let answer = match moment {
        Moment::Never | Moment::Before => scene.lives.ask(10, nodeid, op),
        Moment::After(steps) => {
            scene.fault.after(steps);
            scene.lives.carry_out_unanswered(10, nodeid, op);
            let struck = scene.fault.has_struck();
            scene.fault.end();
            if !struck {
                return None;
            }
            scene.lives.die();
            scene.lives.ask(10 | abi::UNIQUE_RESEND, nodeid, op)
        }
    };
    let (known, tree) = (scene.known(), scene.tree());
    scene.lives.die();
    let (known_later, tree_later) = (scene.known(), scene.tree());
    let on_branches = if options.duplicates { on_branches(&scene.place) } else { BTreeMap::new() };
    scene.lives.bury();
    Some(Outcome { answer: answer.map(drop), tree, known, tree_later, known_later, on_branches })
}

/// Whether two files are the same, but for a count of links that may be too high: of files of the last
/// branch, where names of them were copied or hidden.
fn is_same(seen: Option<&Leaf>, wanted: Option<&Leaf>) -> bool {
    let (Some(seen), Some(wanted)) = (seen, wanted) else { return seen.is_none() && wanted.is_none() };
    let is_counted = wanted.content.starts_with(b"lower-linked");
    let tolerated = is_counted && seen.links == wanted.links + 1;
    *seen == Leaf { links: if tolerated { seen.links } else { wanted.links }, ..wanted.clone() }
}

/// Describes the files that are other ones on the branches; empty where none is. A death between a copy to a higher branch
/// and the removal below leaves a copy, which then goes with the file.
fn other_files(tree: &Tree, seen: &BTreeMap<String, Vec<u8>>, wanted: &BTreeMap<String, Vec<u8>>) -> String {
    let is_left = |path: &str| {
        let name = &path[path.find('/').unwrap()..];
        !wanted.contains_key(path) && tree.get(name.as_bytes()).map(|leaf| &leaf.content) == seen.get(path)
    };
    let paths = seen.keys().chain(wanted.keys()).collect::<std::collections::BTreeSet<_>>();
    let other = paths.into_iter().filter(|path| seen.get(*path) != wanted.get(*path) && !is_left(path));
    let text = |content: Option<&Vec<u8>>| content.map(|content| String::from_utf8_lossy(content).into_owned());
    other.map(|path| format!("{path}: {:?} instead of {:?}; ", text(seen.get(path)), text(wanted.get(path)))).collect()
}

/// Describes the differences.
fn differences(seen: &Outcome, wanted: &Outcome) -> Vec<String> {
    let reference = wanted;
    let mut all = Vec::new();
    if seen.answer != wanted.answer {
        all.push(format!("answered {:?} instead of {:?}", seen.answer, wanted.answer));
    }
    let other = other_files(&seen.tree_later, &seen.on_branches, &wanted.on_branches);
    if !other.is_empty() {
        all.push(format!("on branches: {other}"));
    }
    for (when, seen, wanted) in [("", &seen.tree, &wanted.tree), ("later ", &seen.tree_later, &wanted.tree_later)] {
        for path in seen.keys().chain(wanted.keys()).collect::<std::collections::BTreeSet<_>>() {
            if !is_same(seen.get(path), wanted.get(path)) {
                let (seen, wanted) = (seen.get(path), wanted.get(path));
                all.push(format!("{when}{}: {seen:?} instead of {wanted:?}", path.escape_ascii()));
            }
        }
    }
    for (when, seen, wanted) in [("", &seen.known, &wanted.known), ("later ", &seen.known_later, &wanted.known_later)] {
        // A file without names is found as long as its node lives.
        let has_name = |path: &String| reference.known_later[path].is_ok();
        let lost = wanted.iter().filter(|(path, answer)| answer.is_ok() && has_name(path) && seen[*path].is_err());
        all.extend(lost.map(|(path, _)| format!("{when}{path} is lost: {:?}", seen[path])));
    }
    all
}

fn at_each_step(options: &UnionOptions, requests: &[(&str, Make)]) {
    let mut failed = Vec::new();
    for (title, make) in requests {
        let wanted = carried_out(options, *make, Moment::Never).unwrap();
        let moments = std::iter::once(Moment::Before).chain((0..STEPS_MAX).map(Moment::After));
        for moment in moments {
            let run = AssertUnwindSafe(|| carried_out(options, *make, moment));
            let found = match catch_unwind(run) {
                Ok(None) => break,
                Ok(Some(seen)) => differences(&seen, &wanted),
                Err(_) => vec!["a panic".to_owned()],
            };
            if !found.is_empty() {
                failed.push(format!("{title}, {moment:?}:\n    {}", found.join("\n    ")));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The kernel does not send a request again if its caller is killed as well: the next process finishes a rename that can
/// be seen, and no later one touches the names.
#[test]
fn a_rename_whose_caller_dies_as_well_is_whole() {
    let options = UnionOptions::default();
    let mut failed = Vec::new();
    let renames = REQUESTS.iter().filter(|(title, _)| title.contains("rename of") || title.contains("the same"));
    for (title, make) in renames {
        let wanted = carried_out(&options, *make, Moment::Never).unwrap().tree;
        for step in 0..STEPS_MAX {
            let mut scene = Scene::new(&options);
            let (nodeid, op) = make(&mut scene.lives);
            let before = scene.tree();
            scene.fault.after(step);
            scene.lives.carry_out_unanswered(10, nodeid, op);
            let struck = scene.fault.has_struck();
            scene.fault.end();
            if !struck {
                break;
            }
            let is = |tree: &Tree, other: &Tree| {
                tree.len() == other.len() && tree.iter().all(|(path, leaf)| is_same(Some(leaf), other.get(path)))
            };
            scene.lives.die();
            let tree = scene.tree();
            if !is(&tree, &before) && !is(&tree, &wanted) {
                let paths: Vec<String> = tree.keys().map(|path| path.escape_ascii().to_string()).collect();
                failed.push(format!("{title}, after {step}: {}", paths.join(" ")));
            }
            scene.lives.die();
            assert!(is(&scene.tree(), &tree), "{title}, after {step}: it is begun again");
            scene.lives.bury();
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_death_between_any_two_steps_is_noticed_by_nobody() {
    at_each_step(&UnionOptions::default(), REQUESTS);
}

#[test]
fn so_it_is_with_marks_of_another_form() {
    let requests: Vec<_> = REQUESTS.iter().filter(|(title, _)| title.contains("whiteout")).copied().collect();
    at_each_step(&UnionOptions { whiteout: Style::Chardev, ..UnionOptions::default() }, &requests);
}

#[test]
fn so_it_is_with_directories_that_go_on_below() {
    let requests: Vec<_> = REQUESTS.iter().filter(|(title, _)| title.contains("directory")).copied().collect();
    let options = UnionOptions { directory_redirect: true, directory_copy_limit: 0, ..UnionOptions::default() };
    at_each_step(&options, &requests);
}

#[test]
fn so_it_is_with_copies_of_files() {
    at_each_step(&changing_copies(), OF_COPIES);
}

/// The caller of a rename dies with the process that serves it, and so does the next process in the middle of finishing
/// it: the one after that finishes or undoes all of it, on each branch.
#[test]
fn a_rename_whose_finisher_dies_as_well_is_whole() {
    let mut failed = Vec::new();
    for (options, requests, finished) in
        [(UnionOptions::default(), REQUESTS, 1..2), (changing_copies(), OF_COPIES, 0..5)]
    {
        let renames = requests.iter().filter(|(title, _)| title.contains("rename of") || title.contains("exchange"));
        for (title, make) in renames {
            let mut whole = Scene::new(&options);
            let before = (whole.tree(), on_branches(&whole.place));
            let (nodeid, op) = make(&mut whole.lives);
            whole.lives.ask(10, nodeid, op).unwrap();
            let wanted = (whole.tree(), on_branches(&whole.place));
            whole.lives.bury();
            for (step, finished) in
                (0..STEPS_MAX).flat_map(|step| finished.clone().map(move |finished| (step, finished)))
            {
                let mut scene = Scene::new(&options);
                let (nodeid, op) = make(&mut scene.lives);
                scene.fault.after(step);
                scene.lives.carry_out_unanswered(10, nodeid, op);
                let struck = scene.fault.has_struck();
                scene.fault.end();
                if !struck {
                    break;
                }
                let fault = Arc::clone(&scene.fault);
                scene.lives.die_twice(|| fault.after(finished));
                scene.fault.end();
                scene.lives.die();
                let (tree, branches) = (scene.tree(), on_branches(&scene.place));
                let is = |other: &Tree| {
                    tree.len() == other.len() && tree.iter().all(|(path, leaf)| is_same(Some(leaf), other.get(path)))
                };
                // Before the first step of a rename that is undone, a file may have moved to a higher branch, and a directory
                // may have been made.
                let name = |path: &str| path.split_once('/').unwrap().1.to_owned();
                let is_kept = |(path, content): (&String, &Vec<u8>)| {
                    branches.iter().any(|(other, found)| name(other) == name(path) && found == content)
                };
                let are_kept = || before.1.iter().all(is_kept);
                let waits = branches.keys().any(|path| path.contains(".wh..wh.old."));
                let is_undone = is(&before.0) && (!options.duplicates || are_kept());
                let other = other_files(&tree, &branches, &wanted.1);
                let is_done = is(&wanted.0) && (!options.duplicates || other.is_empty());
                if waits || !is_undone && !is_done {
                    failed.push(format!("{title}, after {step} and {finished}: {other}"));
                }
                scene.lives.bury();
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
