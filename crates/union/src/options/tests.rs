//! Lists of words as they stand in fstabs.

use super::*;

fn parse(list: &str) -> Result<Words, String> {
    Words::parse(OsStr::new(list)).map_err(|error| error.to_string())
}

fn refused(list: &str) -> String {
    parse(list).map(|_| ()).unwrap_err()
}

#[test]
fn aufs_as_it_stands_in_fstabs() {
    let words =
        parse("br:/ssd=rw:/hdd=ro+wh,create=mfs:10,cpup=bu,udba=reval,rdblk=65536,rdhash=def,dirwh=20,sum,noatime,xino=/tmp/x").unwrap();
    let branches: Vec<String> = words.branches.iter().map(|(path, mode)| format!("{} {mode}", path.display())).collect();
    assert_eq!(branches, ["/ssd rw", "/hdd ro+wh"]);
    assert_eq!((words.options.create.to_string(), words.options.copy_up.to_string()), ("mfs:10".to_owned(), "bu".to_owned()));
    assert_eq!(words.udba, Some(Udba::Reval));
    assert!(words.options.sum);
    assert_eq!(
        words.unneeded.iter().map(|(word, _)| word.as_str()).collect::<Vec<_>>(),
        ["rdblk=65536", "rdhash=def", "dirwh=20", "xino=/tmp/x"]
    );
    assert_eq!(words.rest, ["noatime"]);
}

#[test]
fn overlay_as_containers_call_it() {
    assert_eq!(parse("br:/a,xattr=nosys").unwrap().xattr, Some(false));
    assert!(parse("br:/a,xattr=none").is_err());
    let words = parse(r"lowerdir=/a\:b:/c,upperdir=/up,workdir=/work,volatile,noacl,nosuid").unwrap();
    let branches: Vec<String> = words.branches.iter().map(|(path, mode)| format!("{} {mode}", path.display())).collect();
    assert_eq!(branches, ["/up rw", "/a:b ro+wh", "/c ro+wh"]);
    assert!(!words.options.sync);
    assert_eq!((words.acl, words.rest), (Some(false), vec![OsString::from("nosuid")]));
}

#[test]
fn pools() {
    let words = parse("branches=/a=RW:/b=NC,category.create=pfrd,minfreespace=4G,category.search=ff,category.action=epff").unwrap();
    assert_eq!((words.options.create.to_string(), words.options.min_free), ("pfrd".to_owned(), 4 << 30));
}

#[test]
fn each_word_sets_what_it_says() {
    for (list, holds) in [
        ("shwh", (|words| words.options.show_whiteouts) as fn(&Words) -> bool),
        ("diropq=a", |words| words.options.opaque_always),
        ("diropq=always", |words| words.options.opaque_always),
        ("diropq=w", |words| !words.options.opaque_always),
        ("dirren", |words| words.options.directory_copy_limit == 1_000),
        ("dirren=copy:50", |words| words.options.directory_copy_limit == 50),
        ("dirren=exdev", |words| words.options.directory_copy_limit == 0),
        ("dirren=redirect", |words| words.options.directory_redirect && words.options.directory_copy_limit == 1_000),
        ("redirect_dir=on", |words| words.options.directory_redirect),
        ("nodirren", |words| words.options.directory_copy_limit == 0),
        ("whiteout=chardev", |words| words.options.whiteout == crate::Style::Chardev),
        ("udba=fsnotify", |words| words.udba == Some(Udba::Notify)),
        ("udba=none", |words| words.udba == Some(Udba::None)),
        ("acl", |words| words.acl == Some(true)),
        ("volatile", |words| !words.options.sync),
        ("index=on,redirect_dir=off", |words| words.rest.is_empty()),
        ("", |words| words.rest.is_empty() && words.branches.is_empty()),
    ] {
        assert!(holds(&parse(list).unwrap()), "{list}");
    }
}

#[test]
fn routes_find_their_branches() {
    let list = r"route=*.iso=/hdd,br:/ssd:/hdd=rw,route={a\,b}=mfs";
    let words = parse(list).unwrap();
    assert!(words.options.routes.find(b"x/y.iso").is_some());
    assert!(words.options.routes.find(b"x/y").is_none());
    assert!(words.options.routes.find(b"x/b").is_some());
    let words = parse(r"br:/a\,b:/c\\=ro,noatime").unwrap();
    assert_eq!(words.branches.iter().map(|(path, _)| path.to_str().unwrap()).collect::<Vec<_>>(), ["/a,b", r"/c\"]);
    assert_eq!(words.rest, ["noatime"]);
    assert!(refused("br:/ssd,route=*=/hdd").contains("/hdd, which is no branch"));
    let later = parse("route=*.iso=/hdd").unwrap();
    assert!(later.options.routes.is_empty());
    let later = later.with_branches(vec![(PathBuf::from("/hdd"), BranchMode::rw())]).unwrap();
    assert!(!later.options.routes.is_empty());
}

#[test]
fn nonsense_is_refused_with_the_reason() {
    for (list, part) in [
        ("br:/a,br:/b", "named twice"),
        ("br:/a,lowerdir=/b", "named twice"),
        ("upperdir=/a", "needs lowerdir="),
        ("br", "needs a value"),
        ("create=best", "there is no such policy"),
        ("cpup=mfs", "tdp, bup and bu"),
        ("udba=maybe", "there are none, reval, notify"),
        ("sum=1", "takes no value"),
        ("diropq=x", "there are a, w"),
        ("whiteout=x", "there are wh, chardev and xattr"),
        ("dirren=x", "write copy, copy:ENTRIES, redirect or exdev"),
        ("del:/a", "nacre union add"),
        ("add:1:/a", "nacre union add"),
        ("tier.high=101", "percentage"),
        ("tier.high=50,tier.low=60", "below"),
        ("tier.age=soon", "a time"),
        ("tier.x=1", "there are high, low"),
        ("metacopy=on", "not available yet"),
        ("redirect_dir=nofollow", "there are on, off"),
        ("index=off", "the only value is on"),
        ("category.search=newest", "the only value is ff"),
        ("category.action=epall", "the only value is epff"),
        ("func.open=ff", "there are category.create"),
        ("minfreespace=lots", "is no size"),
        ("route=*.iso", "PATTERN=POLICY"),
        ("br:/a=rz", "no branch attribute"),
    ] {
        let error = refused(list);
        assert!(error.contains(part), "{list}: {error}");
    }
}

#[test]
fn the_documentation_names_every_word() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/union.md")).unwrap();
    // A word in a table: behind a backquote, and not the beginning of a longer one.
    let names = |line: &str, word: &str| {
        line.match_indices(&format!("`{word}")).any(|(at, found)| {
            let next = line[at + found.len()..].chars().next();
            !word.ends_with(char::is_alphanumeric) || !next.is_some_and(|next| next.is_alphanumeric() || next == '_')
        })
    };
    let row = |word: &str| text.lines().find(|line| line.starts_with('|') && names(line, word)).map(str::to_owned);
    for (word, _) in UNNEEDED {
        assert!(row(word).is_some(), "docs/union.md does not name {word}");
    }
    for (word, _) in REFUSED {
        assert!(row(word).is_some_and(|row| row.contains("refused")), "docs/union.md does not say that {word} is refused");
    }
    let obeyed = [
        "br:",
        "dirs=",
        "create=",
        "cpup=",
        "route=",
        "minfreespace=",
        "whiteout=",
        "shwh",
        "sum",
        "diropq=",
        "dirren",
        "nodirren",
        "udba=",
        "acl",
        "lowerdir=",
        "upperdir=",
        "workdir=",
        "volatile",
        "category.search=",
        "category.action=",
        "redirect_dir=",
        "index=",
        "fhsm_sec=",
        "tier.WORD=",
    ];
    for word in obeyed {
        assert!(row(word).is_some_and(|row| !row.contains("refused for now |")), "docs/union.md does not name {word}");
    }
    for word in [
        "+wh",
        "+nolwh",
        "+coo_reg",
        "+coo_all",
        "+moo",
        "+tier",
        "+fhsm",
        "+unpin",
        "+icex",
        "+icexoth",
        "+minfree=",
        "rw",
        "ro",
        "rr",
        "nc",
    ] {
        assert!(row(word).is_some(), "docs/union.md does not name the branch attribute {word}");
    }
}

#[test]
fn own_words_can_be_joined_and_read_again() {
    let words = parse(r"br:/a,create=mfs,noatime,route={a\,b}=ff,dirwh=3,udba=none,sum").unwrap();
    assert_eq!(words.own, ["create=mfs", "route={a,b}=ff", "sum"]);
    let list = Words::join(words.own.iter().map(|word| word.as_os_str()));
    assert_eq!(list, r"create=mfs,route={a\,b}=ff,sum");
    assert_eq!(Words::parse(&list).unwrap().own, words.own);
    // A comma that is literal already stays so.
    assert_eq!(Words::join([std::ffi::OsStr::new(r"x=a\,b\\,c")]), r"x=a\,b\\\,c");
}
