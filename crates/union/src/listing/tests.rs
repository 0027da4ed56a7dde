//! Listings over trees in memory and over a real directory, against a merge that is written to be
//! obviously right.

use super::*;
use crate::marks::{Namespace, Style};
use crate::splitmix::Numbers;
use nacre_layers::{
    host::{Host, HostOptions},
    mem::Mem,
};
use nacre_testkit::name;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const MARKS: Marks = Marks { style: Style::Wh, namespace: Namespace::User };

/// One directory over several branches.
struct Tree {
    branches: Vec<(Arc<dyn Layer>, Node)>,
    reads_marks: bool,
}

fn mem() -> Arc<dyn Layer> {
    Arc::new(Mem::new())
}

impl Tree {
    fn new(layers: Vec<Arc<dyn Layer>>) -> Tree {
        let branches = layers.into_iter().map(|layer| (Arc::clone(&layer), layer.root().unwrap().node)).collect();
        Tree { branches, reads_marks: true }
    }

    fn of(branches: &[&[&str]]) -> Tree {
        let tree = Tree::new(branches.iter().map(|_| mem()).collect());
        for (index, names) in branches.iter().enumerate() {
            for name in *names {
                tree.add(index, name.as_bytes());
            }
        }
        tree
    }

    fn add(&self, branch: usize, bytes: &[u8]) {
        let (layer, root) = &self.branches[branch];
        layer.mknod(&Caller::ROOT, root, name(bytes), Kind::File, 0o644, (0, 0)).unwrap();
    }

    fn sources(&self) -> Vec<Source<'_>> {
        self.branches
            .iter()
            .enumerate()
            .map(|(index, (layer, directory))| Source {
                layer: &**layer,
                shared: Some(layer),
                directory,
                slot: u8::try_from(40 - index).unwrap(),
                reads_marks: self.reads_marks,
                x_directory: false,
            })
            .collect()
    }

    fn page(&self, listings: &Listings, from: u64, token: Option<u64>, room: usize) -> Vec<(String, u64)> {
        self.page_for(Caller::ROOT.pid, listings, from, token, room)
    }

    fn page_for(
        &self,
        pid: u32,
        listings: &Listings,
        from: u64,
        token: Option<u64>,
        room: usize,
    ) -> Vec<(String, u64)> {
        let (mut page, caller) = (Page::new(room), Caller { pid, ..Caller::ROOT });
        let request = Request { key: KEY, token, from, attributes: false, show_whiteouts: false, caller: &caller };
        listings.list(&MARKS, &request, &self.sources(), &mut page).unwrap();
        page.taken
    }

    fn all(&self, listings: &Listings, token: Option<u64>, room: usize) -> Vec<(String, u64)> {
        self.rest(listings, 0, token, room)
    }

    fn rest(&self, listings: &Listings, from: u64, token: Option<u64>, room: usize) -> Vec<(String, u64)> {
        self.rest_for(Caller::ROOT.pid, listings, from, token, room)
    }

    fn rest_for(
        &self,
        pid: u32,
        listings: &Listings,
        from: u64,
        token: Option<u64>,
        room: usize,
    ) -> Vec<(String, u64)> {
        let (mut all, mut from) = (Vec::new(), from);
        loop {
            let page = self.page_for(pid, listings, from, token, room);
            let Some((_, next)) = page.last() else { return all };
            assert_ne!(*next, 0);
            from = *next;
            all.extend(page);
        }
    }
}

const KEY: FileId = FileId { fs: 1, ino: 2, generation: 3 };

#[derive(Default)]
struct Page {
    room: usize,
    taken: Vec<(String, u64)>,
    sources: Vec<Option<usize>>,
}

impl Page {
    fn new(room: usize) -> Page {
        Page { room, ..Page::default() }
    }
}

impl Present for Page {
    fn present(&mut self, of: Presented<'_>) -> Result<bool> {
        if self.taken.len() == self.room {
            return Ok(false);
        }
        self.sources.push(of.source);
        self.taken.push((of.name.to_string(), of.next));
        Ok(true)
    }
}

fn merge_of(kept: &Kept) -> &Merge {
    match &kept.way {
        ListingWay::Merging(merge) => merge,
        ListingWay::Whole(_) => panic!("it reads a whole listing"),
    }
}

fn names(listed: &[(String, u64)]) -> Vec<&str> {
    listed.iter().map(|(name, _)| name.as_str()).collect()
}

fn sorted(listed: &[(String, u64)]) -> Vec<&str> {
    let mut names = names(listed);
    names.sort_unstable();
    names
}

#[test]
fn upper_names_and_whiteouts_hide_lower_ones() {
    let tree = Tree::of(&[
        &["a", ".wh.b", "c", ".wh.c", ".wh..wh.aufs", ".wh..wh.plnk"],
        &["a", "b", "d", ".wh.e", ".wh..", ".wh."],
        &["a", "b", "c", "d", "e", "f", ".wh.f"],
    ]);
    for room in 1..8 {
        assert_eq!(sorted(&tree.all(&Listings::default(), None, room)), ["a", "c", "d", "f"], "room for {room}");
    }
    let tree = Tree { reads_marks: false, ..tree };
    assert_eq!(
        sorted(&tree.all(&Listings::default(), None, 2)),
        ["a", "b", "c", "d", "e", "f"],
        "marks do not count, and are not shown"
    );
}

#[test]
fn one_branch_is_passed_on_in_its_own_order() {
    let tree = Tree::of(&[&["z", "b", ".wh.x", "a"]]);
    let listings = Listings::default();
    let own = {
        let mut batch = batch::Batch::default();
        batch.take(&tree.sources()[0], &Caller::ROOT, 0).unwrap();
        let mut own = Vec::new();
        while let Some((name, _)) = batch.first() {
            own.push(name.to_string());
            batch.advance();
        }
        own.retain(|name| !name.starts_with(".wh."));
        own
    };
    assert_eq!(names(&tree.all(&listings, Some(1), 2)), own);
    assert_eq!(listings.merged.bytes(), 0, "it is not kept: the branch is as fast");
}

#[test]
fn whiteouts_in_place_of_names() {
    let tree = Tree::of(&[&["file"], &["gone", "file", "device", "empty"]]);
    let (layer, root) = &tree.branches[0];
    layer.mknod(&Caller::ROOT, root, name(b"gone"), Kind::Character, 0, (0, 0)).unwrap();
    layer.mknod(&Caller::ROOT, root, name(b"device"), Kind::Character, 0, (1, 3)).unwrap();
    let empty = layer.mknod(&Caller::ROOT, root, name(b"empty"), Kind::File, 0, (0, 0)).unwrap();
    layer
        .setxattr(&Caller::ROOT, &empty.node, b"trusted.overlay.whiteout", b"", nacre_vfs::XattrFlags::default())
        .unwrap();
    assert_eq!(sorted(&tree.all(&Listings::default(), None, 1)), ["device", "empty", "file"]);
    let mut sources = tree.sources();
    sources[0].x_directory = true;
    let mut page = Page::new(9);
    let request =
        Request { key: KEY, token: None, from: 0, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
    Listings::default().list(&MARKS, &request, &sources, &mut page).unwrap();
    assert_eq!(sorted(&page.taken), ["device", "file"]);
}

#[test]
fn long_names_are_hidden_by_links() {
    let long = "n".repeat(255);
    let tree = Tree::of(&[&["a"], &[&long]]);
    assert_eq!(sorted(&tree.all(&Listings::default(), None, 9)), ["a", &long]);
    let (layer, root) = &tree.branches[0];
    assert!(!MARKS.hide(&**layer, &|| Ok(root), name(b"unused"), root, name(long.as_bytes())).unwrap());
    assert_eq!(sorted(&tree.all(&Listings::default(), None, 9)), ["a"]);
    MARKS.unhide(&**layer, root, name(long.as_bytes())).unwrap();
    assert_eq!(sorted(&tree.all(&Listings::default(), None, 9)), ["a", &long]);
}

#[test]
fn whiteouts_are_shown_where_asked_for() {
    let tree = Tree::of(&[&["a", ".wh.b", ".wh..wh.aufs"], &["b"]]);
    let mut page = Page::new(9);
    let request =
        Request { key: KEY, token: Some(1), from: 0, attributes: false, show_whiteouts: true, caller: &Caller::ROOT };
    let listings = Listings::default();
    listings.list(&MARKS, &request, &tree.sources(), &mut page).unwrap();
    assert_eq!(sorted(&page.taken), [".wh.b", "a"]);
    assert_eq!(sorted(&tree.all(&listings, Some(1), 9)), ["a"], "and only there");
}

#[test]
fn attributes_come_from_the_branch_that_shows_the_name() {
    struct Inodes(BTreeMap<String, (usize, u64, bool)>);
    impl Present for Inodes {
        fn present(&mut self, of: Presented<'_>) -> Result<bool> {
            let same = of.found.is_some_and(|found| found.attr.id.ino == of.ino);
            self.0.insert(of.name.to_string(), (of.source.unwrap(), of.ino, same));
            Ok(true)
        }
    }
    let tree = Tree::of(&[&["a"], &["a", "b"]]);
    let mut inodes = Inodes(BTreeMap::new());
    let request =
        Request { key: KEY, token: None, from: 0, attributes: true, show_whiteouts: false, caller: &Caller::ROOT };
    Listings::default().list(&MARKS, &request, &tree.sources(), &mut inodes).unwrap();
    assert_eq!(
        inodes.0.iter().map(|(name, (source, _, same))| (name.as_str(), *source, *same)).collect::<Vec<_>>(),
        [("a", 0, true), ("b", 1, true)]
    );
}

/// What a listing has to be.
fn expected(branches: &[Vec<String>]) -> BTreeSet<String> {
    let (mut shown, mut hidden) = (BTreeSet::new(), BTreeSet::new());
    for branch in branches {
        let mut hides = Vec::new();
        for name in branch {
            match name.strip_prefix(".wh.") {
                Some(of) => hides.push(of.to_owned()),
                None => {
                    if !hidden.contains(name) {
                        shown.insert(name.clone());
                    }
                    hides.push(name.clone());
                }
            }
        }
        hidden.extend(hides);
    }
    shown
}

fn random_branches(numbers: &mut Numbers, count: usize, most: usize, of: usize) -> Vec<Vec<String>> {
    let branch = |numbers: &mut Numbers| {
        let names: BTreeSet<String> = (0..numbers.below(most))
            .map(|_| {
                let name = format!("n{}", numbers.below(of));
                if numbers.next().is_multiple_of(4) { format!(".wh.{name}") } else { name }
            })
            .collect();
        names.into_iter().collect::<Vec<String>>()
    };
    (0..count).map(|_| branch(numbers)).collect()
}

#[test]
fn it_agrees_with_the_obvious_merge() {
    let mut numbers = Numbers(1);
    for round in 0..150 {
        let count = 1 + numbers.below(5);
        let branches = random_branches(&mut numbers, count, 60, 50);
        let listed: Vec<Vec<&str>> =
            branches.iter().map(|branch| branch.iter().map(String::as_str).collect()).collect();
        let tree = Tree::of(&listed.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let wanted = expected(&branches);
        let listings = Listings::default();
        let token = (round % 2 == 0).then_some(round);
        for room in [1, 3, 1000] {
            let got = tree.all(&listings, token, room);
            assert_eq!(sorted(&got), wanted.iter().collect::<Vec<_>>(), "room {room} of {branches:?}");
        }
        assert_eq!(is_empty(&MARKS, &tree.sources()), Ok(wanted.is_empty()));
    }
}

/// From every position, others see what the first reader saw after it: at once, and after a
/// restart.
fn check_positions(tree: &Tree) {
    let whole = tree.all(&Listings::default(), None, 1000);
    let unique: BTreeSet<u64> = whole.iter().map(|(_, next)| *next).collect();
    assert_eq!(unique.len(), whole.len(), "positions are not unique");
    let same = Listings::default();
    tree.all(&same, Some(5), 1000);
    for (index, (_, next)) in whole.iter().enumerate().step_by(1 + whole.len() / 60) {
        let wanted = &whole[index + 1..];
        assert_eq!(tree.rest(&Listings::default(), *next, None, 1000), wanted, "a new start at {index}");
        assert_eq!(tree.rest(&same, *next, Some(5), 700), wanted, "the kept listing at {index}");
        assert_eq!(tree.rest(&same, *next, None, 300), wanted, "no token at {index}");
    }
}

#[test]
fn positions_last() {
    let tree = Tree::of(&[&[], &[], &[]]);
    for number in 0..2000_u32 {
        if number % 7 == 0 {
            tree.add(0, format!("n{number}").as_bytes());
        }
        if number % 5 == 0 {
            tree.add(1, format!(".wh.n{number}").as_bytes());
        }
        tree.add(2, format!("n{number}").as_bytes());
    }
    check_positions(&tree);
}

#[test]
fn positions_last_on_a_real_file_system() {
    let scratch: Vec<tempfile::TempDir> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    for number in 0..3000 {
        std::fs::write(scratch[1].path().join(format!("n{number}")), "").unwrap();
        if number % 10 == 0 {
            std::fs::write(scratch[0].path().join(format!("n{number}")), "").unwrap();
        }
    }
    let host = |path: &std::path::Path| Arc::new(Host::open(HostOptions::new(path)).unwrap()) as Arc<dyn Layer>;
    let tree = Tree::new(scratch.iter().map(|scratch| host(scratch.path())).collect());
    assert_eq!(tree.all(&Listings::default(), None, 100).len(), 3000);
    check_positions(&tree);
    // A position whose next name is gone leads to the name after that.
    let whole = tree.all(&Listings::default(), None, 1000);
    let (at, gone) = (whole[1500].1, &whole[1501].0);
    for scratch in &scratch {
        let _ = std::fs::remove_file(scratch.path().join(gone));
    }
    assert_eq!(names(&tree.rest(&Listings::default(), at, None, 1000)), names(&whole[1502..]));
}

#[test]
fn a_listing_goes_on_when_its_directory_gains_a_branch() {
    let lower = Tree::of(&[&[]]);
    for number in 0..1000 {
        lower.add(0, format!("n{number:04}").as_bytes());
    }
    let listings = Listings::default();
    let first = lower.page(&listings, 0, None, 500);
    // The directory is copied up with one file; the lower branch keeps its slot, 40.
    let upper = Tree::of(&[&["n0700"]]);
    let both = Tree { branches: vec![upper.branches[0].clone(), lower.branches[0].clone()], reads_marks: true };
    let mut sources = both.sources();
    sources[0].slot = 7;
    sources[1].slot = 40;
    let mut page = Page::new(1000);
    let from = first.last().unwrap().1;
    let request =
        Request { key: KEY, token: None, from, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
    listings.list(&MARKS, &request, &sources, &mut page).unwrap();
    let mut all: Vec<&str> = names(&first);
    all.extend(names(&page.taken));
    let unique: BTreeSet<&&str> = all.iter().collect();
    assert_eq!(unique.len(), all.len());
    assert_eq!(
        all.len(),
        1000,
        "the copy stands before the position now, and is shown all the same where it was found first"
    );
    assert!(page.sources.iter().all(|source| *source == Some(1)), "sources are told by their place among all");
}

#[test]
fn files_copied_up_or_removed_meanwhile_are_neither_lost_nor_shown_twice() {
    let tree = Tree::of(&[&["first"], &[]]);
    for number in 0..1000 {
        tree.add(1, format!("n{number:04}").as_bytes());
    }
    let listings = Listings::default();
    let mut all = tree.page(&listings, 0, Some(0), 5);
    let mut token = 0;
    while let Some((_, next)) = all.last() {
        // Each file that was shown is copied up, and so is one that was not yet.
        token += 1;
        for number in [all.len() - 2, all.len() + 300] {
            if number < 1000 {
                let _ = tree.branches[0].0.mknod(
                    &Caller::ROOT,
                    &tree.branches[0].1,
                    name(format!("n{number:04}").as_bytes()),
                    Kind::File,
                    0o600,
                    (0, 0),
                );
            }
        }
        listings.forget(KEY);
        // Somebody else lists all of it meanwhile, which is kept.
        assert_eq!(tree.all(&listings, Some(token), 5000).len(), 1001);
        let page = tree.page(&listings, *next, Some(token), 30);
        if page.is_empty() {
            break;
        }
        all.extend(page);
    }
    assert_eq!(all.len(), 1001);
    assert_eq!(names(&all).into_iter().collect::<BTreeSet<_>>().len(), 1001);
}

/// A lower branch with a hundred names, and one name above.
fn hundred() -> Tree {
    let tree = Tree::of(&[&["first"], &[]]);
    for number in 0..100 {
        tree.add(1, format!("n{number:02}").as_bytes());
    }
    tree
}

#[test]
fn readers_share_a_whole_listing() {
    let (tree, listings) = (hundred(), Listings::default());
    let first = tree.rest_for(1, &listings, 0, Some(1), 30);
    assert_eq!(first.len(), 101);
    // Nobody told us of this: who reads what is kept does not see it.
    tree.add(1, b"new");
    assert_eq!(tree.rest_for(2, &listings, 0, Some(1), 30), first);
    // Two at the same time, in turn.
    let (mut two, mut three) =
        (tree.page_for(2, &listings, 0, Some(1), 30), tree.page_for(3, &listings, 0, Some(1), 20));
    two.extend(tree.rest_for(2, &listings, two[29].1, Some(1), 7));
    three.extend(tree.rest_for(3, &listings, three[19].1, Some(1), 50));
    assert_eq!((two, three), (first.clone(), first));
    assert_eq!(listings.kept.len(), 0, "nothing is held after the end");
}

#[test]
fn who_began_with_a_whole_listing_ends_with_it() {
    let (tree, listings) = (hundred(), Listings::default());
    let whole = tree.rest_for(1, &listings, 0, Some(1), 1000);
    let begun = tree.page_for(2, &listings, 0, Some(1), 20);
    // Copied up: before the reader's position on the upper branch, behind it on the lower one, and
    // the other way round.
    tree.add(0, b"n50");
    tree.add(0, b"n05");
    listings.forget(KEY);
    // Somebody else is at the same place, with another past.
    let other = tree.page_for(3, &listings, 0, Some(1), 20);
    assert_eq!(other[19].1, begun[18].1);
    let rest = tree.rest_for(2, &listings, begun[18].1, Some(1), 9);
    assert_eq!([&begun[..19], &rest].concat(), whole, "each name once");
    assert_eq!(tree.rest_for(3, &listings, other[19].1, Some(1), 30).len(), 81);
}

#[test]
fn another_thread_goes_on_with_a_copy() {
    let (tree, listings) = (hundred(), Listings::default());
    for token in [Some(1), None] {
        listings.forget(KEY);
        let begun = tree.page_for(1, &listings, 0, token, 20);
        let copied = format!("n{}", 50 + token.unwrap_or(0));
        tree.add(0, copied.as_bytes());
        listings.forget(KEY);
        for reader in [2, 1] {
            let rest = tree.rest_for(reader, &listings, begun[19].1, token, 30);
            assert_eq!(rest.iter().filter(|(name, _)| *name == copied).count(), 1, "reader {reader}, token {token:?}");
            assert!(rest.iter().all(|listed| !begun.contains(listed)));
        }
    }
}

#[test]
fn a_listing_goes_on_without_a_branch_that_is_removed() {
    let mut numbers = Numbers(2);
    for round in 0..600 {
        let count = 2 + numbers.below(3);
        let mut branches = random_branches(&mut numbers, count, 60, 50);
        for names in &mut branches {
            let whited: BTreeSet<String> =
                names.iter().filter_map(|name| name.strip_prefix(".wh.")).map(str::to_owned).collect();
            names.retain(|name| !whited.contains(name));
        }
        let listed: Vec<Vec<&str>> =
            branches.iter().map(|branch| branch.iter().map(String::as_str).collect()).collect();
        let tree = Tree::of(&listed.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let before = expected(&branches);
        let (listings, token) = (Listings::default(), (round % 2 == 0).then_some(1));
        if round % 4 == 0 {
            assert_eq!(tree.rest_for(9, &listings, 0, token, 1000).len(), before.len());
        }
        // Some names are read, and of the last reply not all have reached the reader.
        let mut seen = Vec::new();
        let mut over = false;
        for _ in 0..numbers.below(4) {
            let page = tree.page(&listings, seen.last().map_or(0, |(_, next)| *next), token, 1 + numbers.below(20));
            over |= page.is_empty();
            seen.extend(page);
        }
        let exact = numbers.next().is_multiple_of(2);
        if !exact {
            seen.truncate(seen.len().saturating_sub(numbers.below(3)));
        }
        let Some((_, from)) = seen.last().filter(|_| !over) else { continue };
        let gone = numbers.below(count);
        listings.branch_is_gone(tree.sources()[gone].slot);
        let left = Tree { branches: tree.branches.clone(), reads_marks: true };
        let sources: Vec<Source<'_>> =
            left.sources().into_iter().enumerate().filter(|(at, _)| *at != gone).map(|(_, source)| source).collect();
        let after = expected(
            &branches
                .iter()
                .enumerate()
                .filter(|(at, _)| *at != gone)
                .map(|(_, names)| names.clone())
                .collect::<Vec<_>>(),
        );
        let mut from = *from;
        loop {
            let mut page = Page::new(9);
            let request =
                Request { key: KEY, token, from, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
            listings.list(&MARKS, &request, &sources, &mut page).unwrap();
            let Some((_, next)) = page.taken.last() else { break };
            from = *next;
            // What a look-up does not find goes unseen.
            let there = page
                .taken
                .iter()
                .zip(&page.sources)
                .filter(|((name, _), source)| source.is_some() || after.contains(name));
            seen.extend(there.map(|(listed, _)| listed.clone()));
        }
        let unique: BTreeSet<String> = seen.iter().map(|(name, _)| name.clone()).collect();
        let lost: Vec<&String> = before.intersection(&after).filter(|name| !unique.contains(*name)).collect();
        assert!(lost.is_empty(), "round {round}: {lost:?} are lost without branch {gone} of {branches:?}");
        assert!(!exact || unique.len() == seen.len(), "round {round}: {seen:?} without branch {gone} of {branches:?}");
    }
}

#[test]
fn the_first_names_come_before_the_merge_is_complete() {
    let tree = Tree::of(&[&[], &["last"]]);
    for number in 0..5000 {
        tree.add(0, format!("n{number}").as_bytes());
    }
    let listings = Listings::default();
    let page = tree.page(&listings, 0, None, 10);
    assert_eq!(page.len(), 10);
    assert_eq!(listings.kept.len(), 1);
    let request = Request {
        key: KEY,
        token: None,
        from: page[9].1,
        attributes: false,
        show_whiteouts: false,
        caller: &Caller::ROOT,
    };
    let merge = listings.kept.take(&Ticket::new(&request, &tree.sources()), page[9].1).unwrap();
    let merge = merge_of(&merge);
    // The first of a large directory are taken at once, and one batch is read behind them.
    assert!(merge.entered() <= 16 + 50, "{} names were read before the first ten were handed out", merge.entered());
}

#[test]
fn a_merge_holds_sixteen_bytes_for_each_upper_name() {
    let tree = Tree::of(&[&[], &[]]);
    let (upper, lower) = (20_000, 60_000);
    let long = "x".repeat(200);
    for number in 0..lower {
        let name = format!("{long}{number}");
        tree.add(1, name.as_bytes());
        match number {
            0..10_000 => tree.add(0, name.as_bytes()),
            10_000..20_000 => tree.add(0, format!(".wh.{name}").as_bytes()),
            _ => {}
        }
    }
    let listings = Listings::default();
    let (mut count, mut from, mut most) = (0, 0, 0);
    loop {
        let page = tree.page(&listings, from, None, 1000);
        count += page.len();
        let Some((_, next)) = page.last() else { break };
        from = *next;
        let request =
            Request { key: KEY, token: None, from, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
        let ticket = Ticket::new(&request, &tree.sources());
        let kept = listings.kept.take(&ticket, from).unwrap();
        most = most.max(merge_of(&kept).bytes_of_set());
        listings.kept.keep(ticket, kept.reached, listings.kept.changes(), kept.way);
    }
    assert_eq!(count, lower - 10_000);
    assert_eq!(listings.kept.len(), 0, "nothing is held after the end");
    assert!(most > 12 * upper && most <= 16 * upper, "{most} bytes for {upper} names");
}

#[test]
fn a_merge_holds_the_names_of_the_smaller_side() {
    let tree = Tree::of(&[&[], &[]]);
    let (upper, lower) = (30_000, 1_500);
    for number in 0..upper {
        tree.add(0, format!("n{number}").as_bytes());
    }
    for number in 0..lower {
        // Some names are on both, some hidden, some not.
        tree.add(1, format!("n{}", number * 30).as_bytes());
        if number * 30 >= upper && number % 2 == 0 {
            tree.add(0, format!(".wh.n{}", number * 30).as_bytes());
        }
    }
    let listings = Listings::default();
    let (mut all, mut from, mut last) = (Vec::new(), 0, usize::MAX);
    loop {
        let page = tree.page(&listings, from, None, 1000);
        let Some((_, next)) = page.last() else { break };
        from = *next;
        all.extend(page);
        let request =
            Request { key: KEY, token: None, from, attributes: false, show_whiteouts: false, caller: &Caller::ROOT };
        let ticket = Ticket::new(&request, &tree.sources());
        let kept = listings.kept.take(&ticket, from).unwrap();
        last = merge_of(&kept).bytes_of_set();
        listings.kept.keep(ticket, kept.reached, listings.kept.changes(), kept.way);
    }
    assert!(last <= 16 * lower, "{last} bytes for {lower} names");
    let only_below = (0..lower).filter(|number| number * 30 >= upper && number % 2 == 1).count();
    assert_eq!(all.len(), upper + only_below);
    assert_eq!(names(&all).into_iter().collect::<BTreeSet<_>>().len(), all.len());
    // Coming back from elsewhere costs no more memory, and finds the same.
    let rest = tree.rest(&Listings::default(), all[upper + 10].1, None, 500);
    assert_eq!(rest, all[upper + 11..]);
}

#[test]
fn only_files_that_will_be_shown_are_examined() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["shown", "hidden", ".wh.other"] {
        std::fs::write(scratch.path().join(name), b"").unwrap();
    }
    let host: Arc<dyn Layer> = Arc::new(Host::open(HostOptions::new(scratch.path())).unwrap());
    let tree = Tree::new(vec![host]);
    let entered = parking_lot::Mutex::<entered::Entered>::default();
    entered.lock().hidden.enter(b"hidden", 0);
    for (number, show_whiteouts, examined) in [
        (0, false, &["hidden", "shown"][..]),
        (1, false, &["shown"]),
        (1, true, &[".wh.other", "shown"]),
        (0, true, &[".wh.other", "hidden", "shown"]),
    ] {
        let request =
            Request { key: KEY, token: None, from: 0, attributes: true, show_whiteouts, caller: &Caller::ROOT };
        let mut batch = batch::Batch::default();
        batch.take_with_attributes(&tree.sources()[0], &request, 0, (&entered, number)).unwrap();
        let (mut found, mut all) = (Vec::new(), 0);
        while let Some((name, _)) = batch.first() {
            found.extend(batch.entry().map(|_| name.to_string()));
            all += 1;
            batch.advance();
        }
        found.sort();
        assert_eq!((found, all), (examined.iter().map(|name| (*name).to_owned()).collect(), 3));
    }
}

#[test]
fn counting_goes_on_where_it_stopped() {
    let tree = Tree::of(&[&[".wh.a", ".wh.b", "c"]]);
    for number in 0..9 {
        tree.add(0, format!("n{number}").as_bytes());
    }
    let (sources, mut count) = (tree.sources(), batch::Count::default());
    for (most, more) in [(3, true), (3, true), (9, true), (10, false), (10, false)] {
        assert_eq!(count.up_to(most, &sources[0], &Caller::ROOT), Ok(more), "{most}");
    }
}

#[test]
fn whole_listings_are_kept_until_something_changes() {
    let tree = Tree::of(&[&["a", "b"], &["b", "c", "d"]]);
    let listings = Listings::default();
    let first = tree.all(&listings, Some(1), 2);
    assert!(listings.merged.bytes() > 0);
    // Nobody told us of this, and the token is the same: what was kept is answered.
    tree.add(1, b"e");
    assert_eq!(tree.all(&listings, Some(1), 3), first);
    assert_eq!(tree.all(&listings, None, 3).len(), 5, "without a token nothing kept is used");
    assert_eq!(tree.all(&listings, Some(2), 3).len(), 5, "nor with another one");
    tree.add(0, b"f");
    listings.forget(KEY);
    assert_eq!(listings.merged.bytes(), 0);
    assert_eq!(tree.all(&listings, Some(2), 3).len(), 6);
    // In the middle of a recording.
    listings.forget(KEY);
    let page = tree.page(&listings, 0, Some(3), 2);
    tree.add(0, b"g");
    listings.forget(KEY);
    tree.rest(&listings, page[1].1, Some(3), 2);
    assert_eq!(listings.merged.bytes(), 0);
    assert_eq!(tree.all(&listings, Some(3), 2).len(), 7);
    assert!(listings.merged.bytes() > 0, "the next one is recorded again");
    listings.forget_all();
    assert_eq!(listings.merged.bytes(), 0);
    tree.add(0, b"h");
    assert_eq!(tree.all(&listings, Some(3), 2).len(), 8);
}

#[test]
fn what_is_kept_stays_within_its_budget() {
    let tree = Tree::of(&[&["a"], &[]]);
    for number in 0..200 {
        tree.add(1, format!("n{number}").as_bytes());
    }
    let listings = Listings::new(20_000);
    for ino in 0..20 {
        let request = Request {
            key: FileId { ino, ..KEY },
            token: Some(0),
            from: 0,
            attributes: false,
            show_whiteouts: false,
            caller: &Caller::ROOT,
        };
        listings.list(&MARKS, &request, &tree.sources(), &mut Page::new(1000)).unwrap();
        assert!(listings.merged.bytes() <= 20_000);
    }
    assert!(listings.merged.bytes() > 5_000);
    // What is too large by itself is not kept, and listed all the same.
    let small = Listings::new(2_000);
    assert_eq!(tree.all(&small, Some(1), 1000).len(), 201);
    assert_eq!(small.merged.bytes(), 0);
}

#[test]
fn changes_are_seen_by_the_next_call() {
    let tree = Tree::of(&[&["a"], &["b", "c", "d", "e"]]);
    let listings = Listings::default();
    let page = tree.page(&listings, 0, None, 2);
    assert_eq!(names(&page), ["a", "b"]);
    let (layer, root) = &tree.branches[1];
    layer.unlink(&Caller::ROOT, root, name(b"c")).unwrap();
    listings.forget(KEY);
    assert_eq!(names(&tree.rest(&listings, page[1].1, None, 9)), ["d", "e"]);
}

#[test]
fn a_directory_that_is_gone_on_a_branch_is_passed_over() {
    let tree = Tree::of(&[&["a"], &["b"]]);
    let scratch = tempfile::tempdir().unwrap();
    std::fs::create_dir(scratch.path().join("gone")).unwrap();
    let host: Arc<dyn Layer> = Arc::new(Host::open(HostOptions::new(scratch.path())).unwrap());
    let gone = host.lookup(&Caller::ROOT, &host.root().unwrap().node, name(b"gone")).unwrap().node;
    std::fs::remove_dir(scratch.path().join("gone")).unwrap();
    let both = Tree { branches: vec![(host, gone), tree.branches[1].clone()], reads_marks: true };
    assert_eq!(sorted(&both.all(&Listings::default(), None, 9)), ["b"]);
}

#[test]
fn many_readers_do_not_disturb_each_other() {
    let tree = Tree::of(&[&[], &[]]);
    for number in 0..3000 {
        tree.add(usize::from(number % 3 != 0), format!("n{number}").as_bytes());
    }
    let listings = Listings::default();
    std::thread::scope(|scope| {
        for room in [7, 50, 333, 1000] {
            for token in [None, Some(4)] {
                let (tree, listings) = (&tree, &listings);
                scope.spawn(move || {
                    for _ in 0..3 {
                        let all = tree.all(listings, token, room);
                        assert_eq!(all.iter().map(|(name, _)| name).collect::<BTreeSet<_>>().len(), 3000);
                        assert_eq!(all.len(), 3000);
                    }
                });
            }
        }
    });
}

#[test]
fn purging_takes_everything_and_follows_nothing() {
    let tree = Tree::of(&[&["a", ".wh.b", ".wh..wh..opq"]]);
    let (layer, root) = &tree.branches[0];
    let caller = &Caller::ROOT;
    let outside = layer.mkdir(caller, root, name(b"outside"), 0o755).unwrap().node;
    layer.mknod(caller, &outside, name(b"kept"), Kind::File, 0o644, (0, 0)).unwrap();
    let top = layer.mkdir(caller, root, name(b"top"), 0o755).unwrap().node;
    layer.symlink(caller, &top, name(b"link"), b"../outside").unwrap();
    let mut deep = top.clone();
    for _ in 0..3000 {
        deep = layer.mkdir(caller, &deep, name(b"d"), 0o755).unwrap().node;
        layer.mknod(caller, &deep, name(b"f"), Kind::File, 0o644, (0, 0)).unwrap();
    }
    for number in 0..1500 {
        layer.mknod(caller, &top, name(format!("n{number}").as_bytes()), Kind::File, 0o644, (0, 0)).unwrap();
    }
    purge(&**layer, &top).unwrap();
    layer.rmdir(caller, root, name(b"top")).unwrap();
    assert!(layer.lookup(caller, &outside, name(b"kept")).is_ok());
    purge(&**layer, root).unwrap();
    assert!(tree.all(&Listings::default(), None, 9).is_empty());
}
