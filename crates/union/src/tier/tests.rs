//! Decisions over random tiers and files.

use super::*;
use proptest::prelude::*;

fn file(tier: usize, size: u64, last_used: u64, heat: f64) -> Candidate {
    Candidate { path: b"file".to_vec(), tier, size, last_used: Duration::from_secs(last_used), heat, pinned: false }
}

fn after(tiers: &[TierView], files: &[Candidate], steps: &[Step]) -> Vec<TierView> {
    let mut tiers = tiers.to_vec();
    for step in steps {
        let file = &files[step.file];
        tiers[file.tier].used -= file.size;
        tiers[step.to].used += file.size;
    }
    tiers
}

#[test]
fn rules_read_what_they_write() {
    for text in [
        "high=90,low=80,every=30,scan=3600",
        "high=9,low=0,every=30,scan=3600",
        "high=70,low=60,age=2592000,heat=4,min=4096,max=1048576,keep=*.db,keep=a/**,hot=b,cold=*.iso,rate=52428800,every=5,scan=60",
    ] {
        assert_eq!(text.parse::<TierRules>().unwrap().to_string(), text);
    }
    assert_eq!("".parse::<TierRules>().unwrap(), TierRules::default());
    let rules: TierRules = "high=75%,low=50%,age=2w,rate=50M,max=1G,keep=/a/*".parse().unwrap();
    let alone: TierRules = "high=75".parse().unwrap();
    assert_eq!((alone.high, alone.low), (75, 65), "a default does not contradict");
    assert_eq!((rules.high, rules.low, rules.age), (75, 50, Some(Duration::from_secs(1_209_600))));
    assert_eq!((rules.rate, rules.max_size, &rules.keep[..]), (Some(50 << 20), Some(1 << 30), &["a/*".to_owned()][..]));
    for (text, part) in [
        ("high=0", "percentage"),
        ("high=80,low=80", "must be below"),
        ("heat=0", "number of opens"),
        ("age=1y", "a time"),
        ("keep=", "a pattern"),
        ("keep=[", "["),
        ("cool=1", "there are high"),
        ("high", "WORD=VALUE"),
        ("max=big", "is no size"),
    ] {
        let error = text.parse::<TierRules>().unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_full_tier_sends_the_coldest_down() {
    let tiers = [TierView { used: 95, total: 100 }, TierView { used: 0, total: 1000 }];
    let files = [file(0, 10, 50, 0.0), file(0, 10, 10, 0.0), file(0, 10, 5, 3.0), file(0, 10, 99, 0.0)];
    let steps = plan(&TierRules::default(), Duration::from_secs(100), &tiers, &files);
    let step = |file| Step { file, to: 1, why: Why::Full };
    assert_eq!(steps, [step(1), step(0)]);
    assert!(
        plan(&TierRules::default(), Duration::from_secs(100), &[TierView { used: 90, total: 100 }, tiers[1]], &files)
            .is_empty()
    );
}

#[test]
fn patterns_ages_and_heat_are_obeyed() {
    let tiers =
        [TierView { used: 10, total: 100 }, TierView { used: 10, total: 100 }, TierView { used: 10, total: 100 }];
    let named = |name: &str, file: Candidate| Candidate { path: name.as_bytes().to_vec(), ..file };
    let files = [
        named("a/x.iso", file(0, 1, 100, 0.0)),
        named("db/y", file(2, 1, 0, 0.0)),
        named("old", file(0, 1, 0, 0.0)),
        named("much", file(2, 1, 100, 5.0)),
        named("kept", file(0, 1, 0, 0.0)),
        Candidate { pinned: true, ..named("pinned", file(0, 1, 0, 0.0)) },
        named("large", file(0, 50, 0, 0.0)),
        named("old but used", file(0, 1, 0, 5.0)),
    ];
    let rules: TierRules = "age=60,heat=4,cold=*.iso,hot=db/**,keep=kept,max=40".parse().unwrap();
    let steps = plan(&rules, Duration::from_secs(100), &tiers, &files);
    let wanted = [(0, 2, Why::Pattern), (2, 1, Why::Old), (1, 0, Why::Pattern), (3, 1, Why::Hot)];
    assert_eq!(steps, wanted.map(|(file, to, why)| Step { file, to, why }));
}

fn scene() -> impl Strategy<Value = (TierRules, Vec<TierView>, Vec<Candidate>)> {
    let rules =
        (2_u8..=100, 0_u8..100, prop::option::of(0_u64..100), prop::option::of(1_u32..5), prop::option::of(1_u64..40))
            .prop_map(|(high, low, age, heat, max_size)| TierRules {
                high,
                low: low % high,
                age: age.map(Duration::from_secs),
                heat,
                max_size,
                keep: vec!["keep".to_owned()],
                hot: vec!["hot".to_owned()],
                cold: vec!["cold".to_owned()],
                ..TierRules::default()
            });
    let files = prop::collection::vec(
        (
            0_usize..4,
            0_u64..50,
            0_u64..100,
            0_u32..6,
            any::<bool>(),
            prop::sample::select(vec!["file", "keep", "hot", "cold"]),
        ),
        0..40,
    );
    (rules, 1_usize..4, prop::collection::vec(1_u64..600, 3), files).prop_map(|(rules, count, extra, files)| {
        let files: Vec<Candidate> = files
            .into_iter()
            .map(|(tier, size, last_used, heat, pinned, name)| Candidate {
                path: name.as_bytes().to_vec(),
                pinned: pinned && heat == 0,
                ..file(tier % count, size, last_used, f64::from(heat))
            })
            .collect();
        let used = |tier: usize| files.iter().filter(|file| file.tier == tier).map(|file| file.size).sum::<u64>();
        let tiers = (0..count).map(|tier| TierView { used: used(tier), total: used(tier) + extra[tier] }).collect();
        (rules, tiers, files)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_is_sound((rules, tiers, files) in scene()) {
        let now = Duration::from_secs(100);
        let steps = plan(&rules, now, &tiers, &files);
        let end = after(&tiers, &files, &steps);
        let mut seen = std::collections::HashSet::new();
        for step in &steps {
            let file = &files[step.file];
            prop_assert!(seen.insert(step.file), "twice: {step:?}");
            prop_assert!(step.to < tiers.len() && step.to != file.tier);
            prop_assert!(!file.pinned && file.path != b"keep" && rules.max_size.is_none_or(|max| file.size <= max), "{file:?}");
            prop_assert!(step.why != Why::Hot || step.to < file.tier);
            prop_assert!(!matches!(step.why, Why::Old | Why::Full) || step.to > file.tier);
        }
        for (index, (before, after)) in tiers.iter().zip(&end).enumerate() {
            let grew = after.used > before.used;
            prop_assert!(!grew || !after.is_above(rules.high), "tier {index} has been filled: {before:?} {after:?}");
        }
        // Whoever left a full tier was not warmer than who could have gone and stayed.
        for step in steps.iter().filter(|step| step.why == Why::Full) {
            let gone = &files[step.file];
            for (index, file) in files.iter().enumerate() {
                let same_kind = file.tier == gone.tier && file.size == gone.size && file.path == b"file" && !file.pinned;
                if same_kind && !seen.contains(&index) {
                    prop_assert!((gone.heat, gone.last_used) <= (file.heat, file.last_used), "{gone:?} went and {file:?} stayed");
                }
            }
        }
        // What has been done needs not be done again and again: where nobody uses anything
        // meanwhile, files come to rest. A few may go back, where others have made room by then.
        let (mut tiers, mut files) = (tiers, files);
        let mut left = 0;
        for _ in 0..20 {
            let steps = plan(&rules, now, &tiers, &files);
            left = steps.len();
            tiers = after(&tiers, &files, &steps);
            for step in steps {
                files[step.file].tier = step.to;
            }
            if left == 0 {
                break;
            }
        }
        prop_assert_eq!(left, 0, "no end of it: {:?}", files);
    }
}
