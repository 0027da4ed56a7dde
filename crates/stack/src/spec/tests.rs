//! Tests of both text forms: their meaning, their equivalence, and refused texts. The examples of
//! docs/stack.md run here.

use super::*;
use proptest::prelude::*;
use std::{ffi::OsString, os::unix::ffi::OsStringExt};

fn line(text: &str) -> StackSpec {
    StackSpec::from_line(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refusal(text: &str) -> String {
    StackSpec::from_line(text.as_bytes()).unwrap_err().to_string()
}

fn remap(spec: &StackSpec) -> &RemapSpec {
    match spec.layers.iter().find(|layer| matches!(layer, LayerSpec::Remap(_))) {
        Some(LayerSpec::Remap(remap)) => remap,
        _ => panic!("no remap in {spec}"),
    }
}

#[test]
fn a_line_says_what_it_says() {
    let spec = line(
        "host:/srv/data,coherence=exclusive,ioctl | remap:force-user=alice,perms=u=rwX:g=rD,hide=*.o,hide=*.tmp,delete-deny | readonly",
    );
    assert_eq!(spec.layers.len(), 3);
    let host = HostSpec {
        source: "/srv/data".into(),
        coherence: HostCoherence::Exclusive,
        ioctl: true,
        ..HostSpec::default()
    };
    assert_eq!(spec.layers[0], LayerSpec::Host(host));
    let remap = remap(&spec);
    assert_eq!(remap.force_user.as_deref(), Some("alice"));
    assert_eq!(remap.perms.as_deref(), Some("u=rwX:g=rD"));
    assert_eq!(remap.hide, ["*.o", "*.tmp"]);
    assert!(remap.delete_deny && !remap.rename_deny);
    assert_eq!(spec.layers[2].name(), "readonly");
}

#[test]
fn escapes_protect_separators() {
    let spec = line("host:/a\\,b\\|c\\\\d\\ ,coherence=watch|remap:hide=x\\x2cy , perms=a+r ");
    assert_eq!(spec.layers[0], LayerSpec::Host(HostSpec { source: "/a,b|c\\d ".into(), ..HostSpec::default() }));
    assert_eq!((remap(&spec).hide.as_slice(), remap(&spec).perms.as_deref()), (&["x,y".to_owned()][..], Some("a+r")));
    // Blanks around a key are part of it, and no such key exists: only the ends of a setting are
    // trimmed.
    assert!(refusal("host:/a|remap:perms =a+r").contains("unknown key \"perms \""));
    let bytes = line("host:/\\xff\\x0a");
    assert_eq!(
        bytes.layers[0],
        LayerSpec::Host(HostSpec { source: OsString::from_vec(b"/\xff\n".to_vec()).into(), ..HostSpec::default() })
    );
    assert_eq!(StackSpec::from_line(bytes.to_line().as_bytes()), Ok(bytes));
}

#[test]
fn the_source_may_look_like_anything() {
    for source in ["/a=b", "a", "coherence=watch", "source=x", "/x:y", "/\u{e9}", " /a ", "\\"] {
        let spec =
            StackSpec { layers: vec![LayerSpec::Host(HostSpec { source: source.into(), ..HostSpec::default() })] };
        assert_eq!(StackSpec::from_line(spec.to_line().as_bytes()), Ok(spec), "{source}");
    }
}

#[test]
fn mistakes_are_named_with_what_is_allowed() {
    for (text, parts) in [
        ("", &["empty", "host:"][..]),
        ("remap:perms=a+r", &["lowest"]),
        ("host:/a | mem", &["layer 2 (mem)", "lowest"]),
        ("host", &["source"]),
        ("host:", &["source"]),
        ("hots:/a", &["layer 1", "\"hots\"", "throttle"]),
        ("host:/a | | readonly", &["layer 2 has no name"]),
        ("host:/a,colour=red", &["layer 1 (host)", "\"colour\"", "coherence", "forward-odirect"]),
        ("host:/a,coherence=always", &["coherence", "exclusive", "revalidate", "always"]),
        ("host:/a,forward-odirect=-1", &["forward-odirect", "-1"]),
        ("mem:size=5 | readonly", &["layer 1 (mem)", "\"size\"", "no settings"]),
        ("mem | remap:uid-offset=1.5", &["uid-offset", "1.5"]),
        ("mem | remap:delete-deny=maybe", &["delete-deny", "maybe"]),
        ("mem | remap:perms", &["perms", "needs a value"]),
        ("mem | remap:", &["empty setting"]),
        ("mem | remap:perms=a+r,,hide=x", &["empty setting"]),
        ("mem | remap:hide=\\", &["backslash"]),
        ("mem | remap:hide=\\xg0", &["hexadecimal"]),
        ("mem | remap:hide=\\xff", &["UTF-8"]),
    ] {
        let error = refusal(text);
        assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
}

#[test]
fn branches_are_directories_or_stacks() {
    let spec = line(
        "union:/a:{host:/b\\,ioctl \\| remap:perms=a-w\\,force-user=5}:/c\\\\:d=nc,option=create=mfs,coherence=exclusive | readonly",
    );
    let LayerSpec::Union(union) = &spec.layers[0] else { panic!("{spec}") };
    let names: Vec<_> = union.branch.0.iter().map(BranchSpec::name).collect();
    assert_eq!(names, [PathBuf::from("/a"), "/b".into(), "/c:d".into()]);
    let modes: Vec<_> = union.branch.0.iter().map(|branch| branch.mode.to_string()).collect();
    assert_eq!(modes, ["rw", "ro", "nc"]);
    let BranchSource::Stack(stack) = &union.branch.0[1].source else { panic!("{spec}") };
    assert_eq!(stack.to_line(), "host:/b,ioctl | remap:force-user=5,perms=a-w");
    assert_eq!(spec.directories(), [Path::new("/a"), Path::new("/b"), Path::new("/c:d")]);
    // A plain directory has the union's coherence, a stack its own.
    assert_eq!(union.branch.0[0].stack(union).to_line(), "host:/a,coherence=exclusive");
    assert_eq!(union.branch.0[1].stack(union), *stack);
    let toml = "[[layer]]\ntype = \"union\"\nbranch = [\"/a\", \"/b:/c=rw\"]\noption = [\"create=ff\"]\n";
    assert_eq!(StackSpec::from_toml(toml).unwrap(), line("union:/a=rw:/b=ro:/c=rw,option=create=ff"));
    for (text, part) in [
        ("union", "\"branch\" is missing"),
        ("union:/a=rx", "\"rx\" is no branch attribute"),
        ("union:/a,option=colour", "no word \"colour\" of unions"),
        ("union:/a,option=br:/b", "branches are settings of their own"),
        ("union:/a,option=udba=none", "udba and acl are not for here"),
        ("union:/a,create=mfs", "unknown key \"create\""),
        ("union:{mem", "has to end with }"),
        ("union:{mem}x", "only =ATTRIBUTES may follow"),
        ("union:{mem \\| cage:size=1G}", "a cage below a union needs state="),
        ("mem | union:/a", "only be the lowest"),
    ] {
        let error = refusal(text);
        assert!(error.contains(part), "{text}: {error}");
    }
    let bytes = line("union:/\\xff=rw");
    assert!(bytes.to_toml().unwrap_err().to_string().contains("UTF-8"));
    assert_eq!(StackSpec::from_line(bytes.to_line().as_bytes()), Ok(bytes));
}

#[test]
fn toml_says_the_same() {
    let toml = r#"
        [[layer]]
        type = "host"
        source = "/srv/data"
        coherence = "exclusive"
        ioctl = true

        [[layer]]
        type = "remap"
        force-user = "alice"
        perms = "u=rwX:g=rD"
        hide = ["*.o", "*.tmp"]
        delete-deny = true
        uid-offset = -5

        [[layer]]
        type = "readonly"
    "#;
    let spec = StackSpec::from_toml(toml).unwrap();
    let same = "host:/srv/data,coherence=exclusive,ioctl | remap:force-user=alice,uid-offset=-5,perms=u=rwX:g=rD,delete-deny,hide=*.o,hide=*.tmp | readonly";
    assert_eq!(spec, line(same));
    assert_eq!(spec.to_line(), same);
}

#[test]
fn toml_mistakes_are_named() {
    let with = |body: &str| {
        StackSpec::from_toml(&format!("[[layer]]\ntype = \"mem\"\n[[layer]]\n{body}")).unwrap_err().to_string()
    };
    for (body, parts) in [
        ("type = \"remap\"\ncolour = \"red\"", &["layer 2 (remap)", "\"colour\"", "force-user", "hide"][..]),
        ("perms = \"a+r\"", &["layer 2", "type"]),
        ("type = \"onion\"", &["layer 2", "\"onion\"", "throttle"]),
        ("type = 5", &["layer 2", "type", "5"]),
        ("type = \"remap\"\nchmod = \"never\"", &["layer 2 (remap)", "never", "ignore"]),
        ("type = \"remap\"\nhide = \"*.o\"", &["layer 2 (remap)", "sequence"]),
        ("type = \"remap\"\ndelete-deny = \"yes\"", &["layer 2 (remap)", "bool"]),
    ] {
        let error = with(body);
        assert!(parts.iter().all(|part| error.contains(part)), "{body}: {error}");
    }
    assert!(StackSpec::from_toml("layers = []").unwrap_err().to_string().contains("layers"));
    assert!(StackSpec::from_toml("").unwrap_err().to_string().contains("empty"));
    assert!(StackSpec::from_toml("[[layer]").unwrap_err().to_string().contains("line 1"));
}

/// Every fenced block of a document with the tag `stack` or `toml` is a stack that parses; a block
/// with the tag `error` is a line and its error.
fn examples(document: &str) -> usize {
    let mut examples = 0;
    let mut blocks = document.split("```");
    blocks.next();
    while let (Some(block), Some(_)) = (blocks.next(), blocks.next()) {
        let (language, text) = block.split_once('\n').unwrap();
        match language {
            "stack" => text.lines().for_each(|text| {
                let spec = line(text);
                assert_eq!(StackSpec::from_line(spec.to_line().as_bytes()), Ok(spec), "{text}");
                examples += 1;
            }),
            "toml" => {
                let spec = StackSpec::from_toml(text).unwrap_or_else(|error| panic!("{text}: {error}"));
                assert_eq!(StackSpec::from_toml(&spec.to_toml().unwrap()), Ok(spec));
                examples += 1;
            }
            "error" => {
                let (text, error) = text.trim_end().split_once('\n').unwrap();
                assert_eq!(refusal(text), error);
                examples += 1;
            }
            other => panic!("a block of an unknown language: {other:?}"),
        }
    }
    examples
}

#[test]
fn the_examples_of_the_documents_are_right() {
    assert_eq!(examples(include_str!("../../../../docs/stack.md")), 12);
    assert_eq!(examples(include_str!("../../../../docs/remap.md")), 2);
}

#[test]
fn the_document_names_every_key() {
    let document = include_str!("../../../../docs/stack.md");
    let remap = include_str!("../../../../docs/remap.md");
    for key in [HostSpec::KEYS, ShiftSpec::KEYS, OverrideStatSpec::KEYS, ThrottleSpec::KEYS, TraceSpec::KEYS].concat() {
        assert!(document.contains(&format!("`{key}`")), "{key} is missing in docs/stack.md");
    }
    for key in RemapSpec::KEYS {
        assert!(remap.contains(&format!("`{key}`")), "{key} is missing in docs/remap.md");
    }
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9@/:,|=\\\\ *.+-]{0,12}", "\\PC{0,6}"]
}

fn source() -> impl Strategy<Value = PathBuf> {
    prop::collection::vec(1u8..=255, 1..20).prop_map(|bytes| PathBuf::from(OsString::from_vec(bytes)))
}

prop_compose! {
    fn remaps()(
        texts in prop::collection::vec(prop::option::of(value()), 8),
        switches in prop::collection::vec(any::<bool>(), 6),
        lists in prop::collection::vec(prop::collection::vec(value(), 0..3), 2),
        offsets in (prop::option::of(any::<i64>()), prop::option::of(any::<i64>())),
        policies in (0usize..3, 0usize..3, 0usize..3, 0usize..3),
        map_passwd in prop::option::of(source()),
    ) -> RemapSpec {
        let change = |place: usize| ChangePolicy::from_word(ChangePolicy::WORDS[place]).unwrap();
        RemapSpec {
            force_user: texts[0].clone(), force_group: texts[1].clone(), mirror: texts[2].clone(), mirror_only: texts[3].clone(),
            map: texts[4].clone(), perms: texts[5].clone(), create_for_user: texts[6].clone(), chmod_filter: texts[7].clone(),
            realistic_permissions: switches[0], delete_deny: switches[1], rename_deny: switches[2], replace_deny: switches[3],
            truncate_deny: switches[4], hide_hard_links: switches[5],
            hide: lists[0].clone(), for_types: lists[1].clone(), uid_offset: offsets.0, gid_offset: offsets.1,
            chown: change(policies.0), chgrp: change(policies.1), chmod: change(policies.2),
            xattr: XattrPolicy::from_word(XattrPolicy::WORDS[policies.3]).unwrap(), map_passwd,
            ..RemapSpec::default()
        }
    }
}

fn leaf() -> impl Strategy<Value = LayerSpec> {
    let coherence = (0..HostCoherence::WORDS.len())
        .prop_map(|place| HostCoherence::from_word(HostCoherence::WORDS[place]).unwrap());
    prop_oneof![
        Just(LayerSpec::Mem(MemSpec {})),
        (source(), coherence, any::<bool>(), prop::option::of(any::<u32>())).prop_map(
            |(source, coherence, ioctl, forward_odirect)| {
                LayerSpec::Host(HostSpec {
                    source,
                    coherence,
                    ioctl,
                    forward_odirect,
                    symlinks: Symlinks::Resolve,
                    ..HostSpec::default()
                })
            }
        ),
    ]
}

/// Branches: directories and stacks.
fn union() -> impl Strategy<Value = LayerSpec> {
    let mode = prop::sample::select(vec!["rw", "ro", "ro+wh", "rr+wh", "nc+minfree=4096", "rw+icexsec+icexusr"]);
    let stack = filter().prop_map(|filter| StackSpec { layers: vec![LayerSpec::Mem(MemSpec {}), filter] });
    let branch = prop_oneof![source().prop_map(BranchSource::Directory), stack.prop_map(BranchSource::Stack)];
    let branch = (branch, mode).prop_map(|(source, mode)| BranchSpec { source, mode: mode.parse().unwrap() });
    let option = prop::collection::vec(
        prop::sample::select(vec!["create=mfs:30", "sum", "route={a,b}=ff", "dirren=copy:5"]),
        0..3,
    );
    let base_log = prop::option::of(source());
    (prop::collection::vec(branch, 1..4), option, base_log).prop_map(|(branches, option, base_log)| {
        let option = option.into_iter().map(str::to_owned).collect();
        LayerSpec::Union(Box::new(UnionSpec {
            branch: Branches(branches),
            option,
            coherence: HostCoherence::Exclusive,
            noatime: false,
            base_log,
            frozen: vec![PathBuf::from("a,b|c")],
        }))
    })
}

/// Nested stacks are parsed recursively: unlimited nesting must not overflow the stack of the
/// process.
#[test]
fn stacks_within_stacks_have_a_limit() {
    let nested = |deep: usize| format!("union:{}{{mem}}{}", "{union:".repeat(deep), "}".repeat(deep));
    let deepest = line(&nested(7));
    assert_eq!(line(&deepest.to_line()), deepest);
    for deep in [8, 10_000] {
        let error = refusal(&nested(deep));
        assert!(error.contains("nested more than 8 deep"), "{error}");
        assert!(BranchSpec::parse(format!("{{{}}}", nested(deep)).as_bytes(), nacre_union::BranchMode::ro()).is_err());
    }
    // A refused line has no side effects.
    assert_eq!(line(&nested(7)), deepest);
}

fn filter() -> impl Strategy<Value = LayerSpec> {
    prop_oneof![
        remaps().prop_map(|remap| LayerSpec::Remap(Box::new(remap))),
        Just(LayerSpec::Readonly(ReadonlySpec {})),
        Just(LayerSpec::Trace(TraceSpec { level: TraceLevel::All })),
        (prop::option::of(value()), prop::option::of(any::<u32>()))
            .prop_map(|(uid, squash_gid)| { LayerSpec::Shift(ShiftSpec { uid, squash_gid, ..ShiftSpec::default() }) }),
        Just(LayerSpec::OverrideStat(OverrideStatSpec { attribute: OverrideAttribute::Containers })),
        (prop::option::of(value()), prop::option::of(value()))
            .prop_map(|(read_rate, write_rate)| LayerSpec::Throttle(ThrottleSpec { read_rate, write_rate })),
    ]
}

proptest! {
    #[test]
    fn what_is_printed_is_read_again(leaf in prop_oneof![leaf(), union()], filters in prop::collection::vec(filter(), 0..4)) {
        let spec = StackSpec { layers: std::iter::once(leaf).chain(filters).collect() };
        let text = spec.to_line();
        prop_assert_eq!(StackSpec::from_line(text.as_bytes()), Ok(spec.clone()), "{}", text);
        if let Ok(toml) = spec.to_toml() {
            prop_assert_eq!(StackSpec::from_toml(&toml), Ok(spec), "{}", toml);
        }
    }

    #[test]
    fn any_text_is_answered_without_a_panic(text in prop::collection::vec(any::<u8>(), 0..40)) {
        let _ = StackSpec::from_line(&text);
    }
}
