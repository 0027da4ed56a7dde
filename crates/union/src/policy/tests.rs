//! Policies by the table, and against a second implementation that is written from the rules
//! without regard to speed.

use super::*;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

/// Branches as `flags free`: `w` writable, `n` no new files, `r` read-only; `p` has the directory.
fn branches(text: &str) -> Vec<BranchView> {
    text.split(' ')
        .map(|branch| {
            let (flags, free) = branch.split_at(branch.find(|c: char| c.is_ascii_digit()).unwrap_or(branch.len()));
            let free = free.parse::<u64>().unwrap_or(0) * GIB;
            BranchView {
                creates: flags.contains('w'),
                writable: flags.contains(['w', 'n']),
                parent_exists: flags.contains('p'),
                parent_depth: u32::from(flags.contains('p')) * 3,
                free,
                used: 100 * GIB - free,
                total: 100 * GIB,
                ..BranchView::default()
            }
        })
        .collect()
}

fn choose(policy: &str, of: &str, limit: usize) -> Result<usize> {
    let branches = branches(of);
    let policy: CreatePolicy = policy.parse().unwrap();
    policy.choose(&Placement { branches: &branches, limit, directory: false }, &PolicyState::new(1))
}

#[test]
fn every_policy_by_the_table() {
    const ALL: usize = 99;
    for (policy, of, limit, wanted) in [
        ("tdp", "w w", ALL, Ok(1)),
        ("tdp", "w wp", ALL, Ok(1)),
        ("tdp", "wp wp", ALL, Ok(0)),
        ("tdp", "w r rp", ALL, Ok(0)),
        ("tdp", "w w rp", ALL, Ok(1)),
        ("tdp", "rp wp", ALL, Ok(1)),
        ("tdp", "rp np w", ALL, Ok(2)),
        ("tdp", "rp w", 0, Err(Errno::EROFS)),
        ("tdp", "r np", ALL, Err(Errno::EROFS)),
        ("tdp", "w w wp", 1, Ok(1)),
        ("tdp", "w r wp", 1, Ok(0)),
        ("tdp", "r r wp", 1, Err(Errno::EROFS)),
        ("tdmfs:10G", "w5 w20 w50", ALL, Ok(1)),
        ("tdmfs:10G", "w10 w11", ALL, Ok(1)),
        ("tdmfs:10G", "w5 w9 r50", ALL, Ok(1)),
        ("tdmfs:10G", "w50 w20", ALL, Ok(0)),
        ("rr", "w r w w", ALL, Ok(3)),
        ("mfs", "w20 w50 w50 w10", ALL, Ok(2)),
        ("mfs", "w20 r50", ALL, Ok(0)),
        ("mfs", "w20 w50 w60", 1, Ok(1)),
        ("mfsrr:30G", "w20 w31 w29", ALL, Ok(1)),
        ("mfsrr:40G", "w20 w31 w29", ALL, Ok(2)),
        ("pmfs", "w90 wp20 wp20 wp10", ALL, Ok(1)),
        ("pmfs", "w90 rp20", ALL, Ok(0)),
        ("pmfsrr:10G", "w90 wp20 wp30", ALL, Ok(2)),
        ("pmfsrr:40G", "w90 wp20 wp30", ALL, Ok(0)),
        ("pmfsrr:99G", "w90 wp20 wp30", ALL, Ok(2)),
        ("ff", "r w w", ALL, Ok(1)),
        ("epff", "w wp wp", ALL, Ok(1)),
        ("epff", "w rp", ALL, Err(Errno::EROFS)),
        ("lfs", "w20 w10 w10", ALL, Ok(1)),
        ("lus", "w20 w30 w30", ALL, Ok(1)),
        ("lup", "w20 w30 w30", ALL, Ok(1)),
        ("epmfs", "w90 wp20 wp20", ALL, Ok(1)),
        ("eplfs", "w1 wp20 wp10", ALL, Ok(2)),
        ("mspmfs", "w90 wp20 wp30", ALL, Ok(2)),
        ("mspmfs", "w90 rp20 w10", ALL, Ok(0)),
        ("pfrd", "w0 w10 r50", ALL, Ok(1)),
        ("pfrd", "w0 w0", ALL, Ok(0)),
        ("newest", "w wp r", ALL, Ok(1)),
        ("ff", "n r", ALL, Err(Errno::EROFS)),
    ] {
        assert_eq!(choose(policy, of, limit), wanted, "{policy} over {of}, limit {limit}");
    }
}

#[test]
fn files_take_turns_and_directories_do_not() {
    let branches = branches("w r w w");
    let state = PolicyState::new(0);
    let choose = |directory| {
        CreatePolicy::RoundRobin.choose(&Placement { branches: &branches, limit: 9, directory }, &state).unwrap()
    };
    let files: Vec<usize> = (0..4).map(|_| choose(false)).collect();
    assert_eq!(files, [3, 2, 0, 3]);
    assert_eq!([choose(true), choose(true), choose(false), choose(true)], [2, 2, 2, 0]);
}

#[test]
fn minimum_free_space_is_kept() {
    let mut branches = branches("w5 w50");
    for branch in &mut branches {
        branch.min_free = 10 * GIB;
    }
    let placement = Placement { branches: &branches, limit: 9, directory: false };
    let state = PolicyState::new(0);
    for policy in ["ff", "rr", "mfs", "lfs", "tdmfs:1G"] {
        assert_eq!(policy.parse::<CreatePolicy>().unwrap().choose(&placement, &state), Ok(1), "{policy}");
    }
    branches[0].parent_exists = true;
    let placement = Placement { branches: &branches, limit: 9, directory: false };
    assert_eq!(CreatePolicy::TopDownParent.choose(&placement, &state), Err(Errno::ENOSPC));
    branches[1].min_free = 60 * GIB;
    let placement = Placement { branches: &branches, limit: 9, directory: false };
    assert_eq!(
        CreatePolicy::RoundRobin.choose(&placement, &state),
        Err(Errno::ENOSPC),
        "not EROFS: it could be written"
    );
}

#[test]
fn random_choices_follow_the_figures() {
    let branches = branches("w10 w0 w30 r90");
    let state = PolicyState::new(7);
    let mut counts = [0_u32; 4];
    for _ in 0..10_000 {
        let placement = Placement { branches: &branches, limit: 9, directory: false };
        counts[CreatePolicy::Pool(Reach::Anywhere, Preference::RandomByFree).choose(&placement, &state).unwrap()] += 1;
    }
    assert_eq!((counts[1], counts[3]), (0, 0));
    assert!((2_200..2_800).contains(&counts[0]), "a quarter of 10,000 is not {}", counts[0]);
    let mut counts = [0_u32; 4];
    for _ in 0..9_000 {
        let placement = Placement { branches: &branches, limit: 9, directory: false };
        counts[CreatePolicy::Pool(Reach::Anywhere, Preference::Random).choose(&placement, &state).unwrap()] += 1;
    }
    assert!(counts[..3].iter().all(|count| (2_700..3_300).contains(count)), "{counts:?}");
}

#[test]
fn copies_go_up() {
    for (policy, of, source, wanted) in [
        ("tdp", "w w rp", 2, Ok(1)),
        ("tdp", "wp w rp", 2, Ok(0)),
        ("tdp", "w rp w rp", 3, Ok(0)),
        ("tdp", "w w wp", 2, Ok(2)),
        ("tdp", "w n rp", 2, Ok(0)),
        ("tdp", "r rp", 1, Err(Errno::EROFS)),
        ("tdp", "rp w", 0, Err(Errno::EROFS)),
        ("bup", "wp wp w rp", 3, Ok(1)),
        ("bup", "w w rp", 2, Ok(1)),
        ("bup", "r r rp", 2, Err(Errno::EROFS)),
        ("bu", "wp wp w rp", 3, Ok(2)),
        ("bu", "wp r rp", 2, Ok(0)),
        ("bu", "wp np", 1, Ok(1)),
    ] {
        let policy: CopyUpPolicy = policy.parse().unwrap();
        assert_eq!(policy.choose(&branches(of), source), wanted, "{policy} of {source} over {of}");
    }
}

#[test]
fn names_stay_with_their_file() {
    let branches = branches("wp r wp rp");
    for (source, limit, wanted) in [(2, 9, 2), (0, 9, 0), (3, 9, 0), (2, 1, 0), (2, 0, 0)] {
        assert_eq!(
            CopyUpPolicy::TopDownParent.choose_for_name(&branches, source, limit),
            Ok(wanted),
            "from {source}, limit {limit}"
        );
    }
    assert_eq!(CopyUpPolicy::BottomUp.choose_for_name(&branches, 3, 9), Ok(2));
    assert_eq!(CopyUpPolicy::BottomUp.choose_for_name(&branches[1..], 1, 0), Err(Errno::EROFS));
}

#[test]
fn explanations_say_why_and_why_not() {
    let names: Vec<String> = ["/ssd", "/hdd", "/old"].iter().map(ToString::to_string).collect();
    let branches = branches("w5 w50 r80");
    let placement = Placement { branches: &branches, limit: 9, directory: false };
    let text = "tdmfs:10G".parse::<CreatePolicy>().unwrap().explain(&placement, &PolicyState::new(0)).text(&names);
    assert_eq!(
        text,
        "/hdd: the highest with more than 10.0G free (it has 50.0G)\n  not /ssd: 5.0G free, not more than 10.0G\n  not /old: read-only\n"
    );
    let placement = Placement { branches: &branches, limit: 0, directory: false };
    let text = "mfs".parse::<CreatePolicy>().unwrap().explain(&placement, &PolicyState::new(0)).text(&names);
    assert!(text.starts_with("/ssd: the lowest on which it would be seen"), "{text}");
    assert!(text.contains("not /hdd: "), "{text}");
    let placement = Placement { branches: &branches[2..], limit: 9, directory: false };
    let text = CreatePolicy::TopDownParent.explain(&placement, &PolicyState::new(0)).text(&names[2..]);
    assert_eq!(text, "nowhere (read-only file system): nothing new may be put on any branch\n  not /old: read-only\n");
    let text = CopyUpPolicy::BottomUp.explain(&branches, 2).text(&names);
    assert_eq!(
        text,
        "/hdd: the next writable one above\n  not /ssd: the policy takes another one\n  not /old: read-only\n"
    );
}

#[test]
fn policies_read_what_they_write() {
    for text in [
        "tdp",
        "tdmfs:10:5",
        "rr",
        "mfs:30",
        "mfsrr:1024:0",
        "pmfs:3600",
        "pmfsrr:5:30",
        "ff",
        "lfs",
        "lus",
        "lup",
        "rand",
        "pfrd",
        "newest",
        "epff",
        "epmfs",
        "eplfs",
        "eplus",
        "eprand",
        "eppfrd",
        "mspff",
        "mspmfs",
        "msplfs",
        "msplus",
        "msppfrd",
    ] {
        assert_eq!(text.parse::<CreatePolicy>().unwrap().to_string(), text);
    }
    for (long, short) in [
        ("top-down-parent", "tdp"),
        ("round-robin", "rr"),
        ("most-free-space", "mfs:30"),
        ("tdmfs:1K", "tdmfs:1024:30"),
    ] {
        assert_eq!(long.parse::<CreatePolicy>().unwrap().to_string(), short);
    }
    for text in ["tdp", "bup", "bu"] {
        assert_eq!(text.parse::<CopyUpPolicy>().unwrap().to_string(), text);
    }
}

#[test]
fn unknown_policies_are_named() {
    for (text, part) in [
        ("best", "there are tdp, tdmfs:LOW[:SEC], rr"),
        ("", "there is no such policy"),
        ("all", "several branches"),
        ("epall", "several branches"),
        ("tdp:5", "nothing after the name"),
        ("mfs:3601", "seconds from 0 to 3600"),
        ("mfs:1:2", "too much"),
        ("mfsrr", "needs a number of bytes"),
        ("tdmfs:x", "is no size"),
        ("ff:1", "nothing after the name"),
    ] {
        let error = text.parse::<CreatePolicy>().unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    assert!("tdmfs".parse::<CopyUpPolicy>().unwrap_err().to_string().contains("tdp, bup and bu"));
}

#[test]
fn figures_are_asked_for_when_they_are_old() {
    let cache = SpaceCache::default();
    let statfs = |available| nacre_vfs::StatFs {
        fragment: 4096,
        available,
        free: available + 1,
        blocks: 100,
        ..Default::default()
    };
    let second = Duration::from_secs(1);
    let get =
        |at: u32, available| cache.get(3, second * at, second * 30, || Ok(statfs(available))).unwrap().free / 4096;
    assert_eq!([get(0, 10), get(29, 20), get(30, 30), get(31, 40)], [10, 10, 30, 30]);
    cache.forget(3);
    assert_eq!(get(31, 50), 50);
    assert_eq!(cache.get(3, second * 99, second, || Err(Errno::EIO)), Err(Errno::EIO));
    let space = cache.get(0, second, Duration::ZERO, || Ok(statfs(10))).unwrap();
    assert_eq!(space, Space { free: 10 * 4096, used: 89 * 4096, total: 100 * 4096 });
}

mod routes {
    use super::super::{Route, Routes, Way};
    use std::{ffi::OsStr, path::PathBuf};

    fn routes(texts: &[&str]) -> Routes {
        let branches = ["/ssd", "/h=d"].map(PathBuf::from);
        Routes::new(texts.iter().map(|text| Route::parse(OsStr::new(text)).unwrap()).collect(), &branches).unwrap()
    }

    #[test]
    fn the_first_that_matches_counts() {
        let routes = routes(&["*.iso=mfs:30", "/movies/**=/h\\=d", "a/*=rr", "{x,y}=/ssd", "*.i?o=tdp"]);
        for (path, wanted) in [
            (&b"a.iso"[..], Some("*.iso")),
            (b"deep/down/a.iso", Some("*.iso")),
            (b"movies/new/b", Some("movies/**")),
            (b"more/movies/b", None),
            (b"a/b", Some("a/*")),
            (b"a/b/c", None),
            (b"q/x", Some("{x,y}")),
            (b"b.ico", Some("*.i?o")),
            (b"\xff\xfe", None),
        ] {
            assert_eq!(routes.find(path).map(|(_, pattern)| pattern), wanted, "{}", path.escape_ascii());
        }
        assert_eq!(routes.find(b"movies/b").unwrap().0, Way::Branch(1));
        assert_eq!(routes.find(b"x").unwrap().0, Way::Branch(0));
        assert!(matches!(routes.find(b"a/b").unwrap().0, Way::Policy(_)));
    }

    #[test]
    fn nonsense_is_refused() {
        for (text, part) in [
            ("*.iso", "write PATTERN=POLICY"),
            ("=mfs", "empty"),
            ("[=mfs", "route=[=mfs"),
            ("*=nothing", "there is no such policy"),
            ("*=", "there is no such policy"),
        ] {
            let error = Route::parse(OsStr::new(text)).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let route = Route::parse(OsStr::new("*=/nowhere")).unwrap();
        assert!(
            Routes::new(vec![route], &[PathBuf::from("/ssd")])
                .unwrap_err()
                .to_string()
                .contains("/nowhere, which is no branch")
        );
    }
}

/// The rules once more, in the words of the manuals: candidates are filtered and sorted, nothing is
/// shared with the real ones.
mod naive {
    use super::super::*;

    pub(super) fn create(policy: CreatePolicy, p: &Placement<'_>, turn: u64) -> Result<Vec<usize>> {
        let open: Vec<usize> = (0..p.branches.len())
            .filter(|i| p.branches[*i].creates && p.branches[*i].free >= p.branches[*i].min_free)
            .collect();
        let full = p.branches.iter().any(|b| b.creates && b.free < b.min_free);
        if open.is_empty() {
            return Err(if full { Errno::ENOSPC } else { Errno::EROFS });
        }
        let free = |i: &usize| p.branches[*i].free;
        let with_parent: Vec<usize> = open.iter().copied().filter(|i| p.branches[*i].parent_exists).collect();
        let mfs = || {
            let mut sorted = open.clone();
            sorted.sort_by_key(|i| (free(i), *i));
            vec![*sorted.last().unwrap()]
        };
        let rr = || {
            let upwards: Vec<usize> = open.iter().rev().copied().collect();
            vec![upwards[(turn % upwards.len() as u64) as usize]]
        };
        let mfsrr = |low: u64| if open.iter().map(free).max().unwrap() < low { rr() } else { mfs() };
        let tdp = || {
            let top = p.branches.iter().position(|b| b.parent_exists).unwrap_or(p.branches.len() - 1);
            let below = || open.iter().copied().find(|i| *i > top).ok_or(Errno::EROFS);
            match up(p, top) {
                Err(Errno::EROFS) => below(),
                other => other,
            }
            .map(|i| vec![i])
        };
        let pmfs = || {
            let mut sorted = with_parent.clone();
            sorted.sort_by_key(|i| (std::cmp::Reverse(free(i)), *i));
            sorted.first().map_or_else(tdp, |i| Ok(vec![*i]))
        };
        let chosen = match policy {
            CreatePolicy::TopDownParent => tdp()?,
            CreatePolicy::TopDownMostFree { low, .. } => {
                open.iter().find(|i| free(i) > low).map_or_else(mfs, |i| vec![*i])
            }
            CreatePolicy::RoundRobin => rr(),
            CreatePolicy::MostFree { .. } => mfs(),
            CreatePolicy::MostFreeRoundRobin { low, .. } => mfsrr(low),
            CreatePolicy::ParentMostFree { .. } => pmfs()?,
            CreatePolicy::ParentMostFreeRoundRobin { low, .. } => {
                let best = pmfs()?;
                if free(&best[0]) < low { mfsrr(low) } else { best }
            }
            CreatePolicy::Pool(reach, preference) => pool(reach, preference, p, &open, &with_parent)?,
        };
        // Wherever it goes: not below what would hide it.
        chosen.into_iter().map(|i| if i > p.limit { up(p, p.limit) } else { Ok(i) }).collect()
    }

    /// All that the dice could say.
    fn pool(
        reach: Reach,
        preference: Preference,
        p: &Placement<'_>,
        open: &[usize],
        with_parent: &[usize],
    ) -> Result<Vec<usize>> {
        let b = p.branches;
        let most = open.iter().map(|i| b[*i].parent_depth).max().unwrap();
        let mut of: Vec<usize> = match reach {
            Reach::Anywhere if preference == Preference::Newest => with_parent.to_vec(),
            Reach::Anywhere => open.to_vec(),
            Reach::Existing => with_parent.to_vec(),
            Reach::MostSpecific => open.iter().copied().filter(|i| b[*i].parent_depth == most).collect(),
        };
        if of.is_empty() {
            return Err(Errno::EROFS);
        }
        match preference {
            Preference::First => {}
            Preference::MostFree => of.sort_by_key(|i| std::cmp::Reverse(b[*i].free)),
            Preference::LeastFree => of.sort_by_key(|i| b[*i].free),
            Preference::LeastUsed => of.sort_by_key(|i| b[*i].used),
            // Totals are powers of two in the test, so that floating point is exact.
            Preference::LeastUsedShare => of.sort_by(|i, j| {
                let share = |i: usize| if b[i].total == 0 { f64::MAX } else { b[i].used as f64 / b[i].total as f64 };
                share(*i).partial_cmp(&share(*j)).unwrap()
            }),
            Preference::Newest => of.sort_by_key(|i| std::cmp::Reverse(b[*i].parent_changed)),
            Preference::Random => return Ok(of),
            Preference::RandomByFree => {
                let some: Vec<usize> = of.iter().copied().filter(|i| b[*i].free > 0).collect();
                return Ok(if some.is_empty() { vec![of[0]] } else { some });
            }
        }
        Ok(vec![of[0]])
    }

    fn up(p: &Placement<'_>, from: usize) -> Result<usize> {
        let mut full = false;
        let mut at = from.min(p.branches.len() - 1) as isize;
        while at >= 0 {
            let b = &p.branches[at as usize];
            if b.creates && b.free >= b.min_free {
                return Ok(at as usize);
            }
            full |= b.creates;
            at -= 1;
        }
        Err(if full { Errno::ENOSPC } else { Errno::EROFS })
    }

    pub(super) fn copy_up(policy: CopyUpPolicy, b: &[BranchView], source: usize) -> Result<usize> {
        if b[source].writable {
            return Ok(source);
        }
        let upwards = |from: usize| (0..=from).rev().filter(|i| *i < source && b[*i].creates).collect::<Vec<usize>>();
        let found = match policy {
            CopyUpPolicy::TopDownParent => {
                upwards((0..=source).find(|i| *i == source || b[*i].parent_exists).unwrap()).first().copied()
            }
            CopyUpPolicy::BottomUpParent => {
                let above = upwards(source);
                above.iter().find(|i| b[**i].parent_exists).or(above.first()).copied()
            }
            CopyUpPolicy::BottomUp => upwards(source).first().copied(),
        };
        found.ok_or(Errno::EROFS)
    }
}

fn some_branch() -> impl Strategy<Value = BranchView> {
    let sizes = prop_oneof![Just(0), Just(GIB), Just(2 * GIB), Just(5 * GIB), 0..10 * GIB];
    (0..4_u8, any::<bool>(), 0..4_u32, 0..3_i64, sizes, 0..3_u64, 0..3_u32).prop_map(
        |(kind, parent_exists, depth, changed, free, min_free, total)| {
            let total = if total == 0 { 0 } else { (16 * GIB) << total };
            BranchView {
                creates: kind < 2,
                writable: kind < 3,
                parent_exists,
                parent_depth: if parent_exists { 4 } else { depth },
                parent_changed: Time { sec: changed, nsec: 0 },
                free,
                used: (total.saturating_sub(free)) >> 20 << 20,
                total,
                min_free: min_free * GIB,
            }
        },
    )
}

fn some_policy() -> impl Strategy<Value = CreatePolicy> {
    let (hold, low) = (Hold(5), prop_oneof![Just(0), Just(GIB), Just(3 * GIB), Just(99 * GIB)]);
    let reaches = prop_oneof![Just(Reach::Anywhere), Just(Reach::Existing), Just(Reach::MostSpecific)];
    let preferences = prop_oneof![
        Just(Preference::First),
        Just(Preference::MostFree),
        Just(Preference::LeastFree),
        Just(Preference::LeastUsed),
        Just(Preference::LeastUsedShare),
        Just(Preference::Random),
        Just(Preference::RandomByFree),
        Just(Preference::Newest),
    ];
    prop_oneof![
        Just(CreatePolicy::TopDownParent),
        low.clone().prop_map(move |low| CreatePolicy::TopDownMostFree { low, hold }),
        Just(CreatePolicy::RoundRobin),
        Just(CreatePolicy::MostFree { hold }),
        low.clone().prop_map(move |low| CreatePolicy::MostFreeRoundRobin { low, hold }),
        Just(CreatePolicy::ParentMostFree { hold }),
        low.prop_map(move |low| CreatePolicy::ParentMostFreeRoundRobin { low, hold }),
        (reaches, preferences).prop_map(|(reach, preference)| CreatePolicy::Pool(reach, preference)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn placements_agree_with_the_rules_written_twice(
        branches in proptest::collection::vec(some_branch(), 1..7),
        policy in some_policy(),
        limit in 0..8_usize,
        turn in 0..9_u64,
        seed: u64,
        directory: bool,
    ) {
        let placement = Placement { branches: &branches, limit, directory };
        let state = PolicyState::new(seed);
        state.turn.store(turn, Ordering::Relaxed);
        let explained = policy.explain(&placement, &state);
        prop_assert_eq!(state.turn.load(Ordering::Relaxed), turn, "explaining moves nothing");
        let chosen = policy.choose(&placement, &state);
        match (&chosen, naive::create(policy, &placement, turn)) {
            (Ok(index), Ok(possible)) => prop_assert!(possible.contains(index), "{} is none of {:?}", index, possible),
            // With dice, one throw may end where nothing is allowed and another not.
            (chosen, wanted) => prop_assert_eq!(chosen.map(drop), wanted.map(drop)),
        }
        if let Ok(index) = chosen {
            prop_assert!(index <= limit && branches[index].creates);
        }
        prop_assert_eq!(explained.chosen, chosen, "the explanation differs from what happens");
        prop_assert_eq!(explained.refused.len(), branches.len() - usize::from(chosen.is_ok()), "{:?}", explained);
        prop_assert!(!explained.because.is_empty());
    }

    #[test]
    fn copies_agree_with_the_rules_written_twice(
        branches in proptest::collection::vec(some_branch(), 1..7),
        source in 0..7_usize,
        policy in prop_oneof![Just(CopyUpPolicy::TopDownParent), Just(CopyUpPolicy::BottomUpParent), Just(CopyUpPolicy::BottomUp)],
    ) {
        let source = source % branches.len();
        let wanted = naive::copy_up(policy, &branches, source);
        prop_assert_eq!(policy.choose(&branches, source), wanted);
        prop_assert_eq!(policy.explain(&branches, source).chosen, wanted);
    }
}
