//! Lists of words as they stand in fstabs.

use super::*;
use std::time::Duration;

fn parse(list: &str) -> Result<Words, ParseError> {
    Words::parse(OsStr::new(list))
}

fn refused(list: &str) -> String {
    parse(list).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn aufs_as_it_stands_in_fstabs() {
    let words =
        parse("br:/ssd=rw:/hdd=ro+wh,create=mfs:10,cpup=bu,udba=reval,rdblk=65536,rdhash=def,dirwh=20,sum,noatime,xino=/tmp/x").unwrap();
    let branches: Vec<String> =
        words.branches.iter().map(|(path, mode)| format!("{} {mode}", path.display())).collect();
    assert_eq!(branches, ["/ssd rw", "/hdd ro+wh"]);
    assert_eq!(
        (words.options.create.to_string(), words.options.copy_up.to_string()),
        ("mfs:10".to_owned(), "bu".to_owned())
    );
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
    let branches: Vec<String> =
        words.branches.iter().map(|(path, mode)| format!("{} {mode}", path.display())).collect();
    assert_eq!(branches, ["/up rw", "/a:b ro+wh", "/c ro+wh"]);
    assert!(!words.options.sync);
    assert_eq!((words.acl, words.rest), (Some(false), vec![OsString::from("nosuid")]));
}

#[test]
fn pools() {
    let words =
        parse("branches=/a=RW:/b=NC,category.create=pfrd,minfreespace=4G,category.search=ff,category.action=epff")
            .unwrap();
    assert_eq!((words.options.create.to_string(), words.options.min_free), ("pfrd".to_owned(), 4 << 30));
}

/// The lines that mergerfs' own documentation recommends, and those of its users.
#[test]
fn the_lines_of_mergerfs_are_taken_as_they_are() {
    let recommended = "cache.files=off,category.create=pfrd,func.getattr=newest,dropcacheonclose=false";
    for (list, notices, rest) in [
        (recommended.to_owned(), 0, &[][..]),
        ("cache.files=auto-full,category.create=pfrd,func.getattr=newest,dropcacheonclose=true".to_owned(), 0, &[]),
        (format!("{recommended},minfreespace=10G,fsname=pool,moveonenospc=true"), 0, &["fsname=pool"]),
        (
            "allow_other,use_ino,cache.files=partial,dropcacheonclose=true,category.create=mfs,moveonenospc=pfrd,category.action=epall,threads=0".to_owned(),
            0,
            &["allow_other", "use_ino"],
        ),
        (
            "category.search=ff,func.readdir=cor:4,ignorepponrename=true,symlinkify=true,symlinkify_timeout=60,link_cow=true,rename-exdev=rel-symlink,threads=4".to_owned(),
            3,
            &[],
        ),
        ("read-thread-count=-2,process-thread-count=4,process_thread_queue_depth=8,fuse_msg_size=1M,pin-threads=R1L".to_owned(), 4, &[]),
        ("category.create=all,func.mknod=rand,func.open=newest,func.rename=newest,passthrough.io=off".to_owned(), 4, &["passthrough=off"]),
        ("nullrw=false,link_cow=false,follow_symlinks=never,lazy-umount-mountpoint=false,nfsopenhack=off".to_owned(), 0, &[]),
    ] {
        let words = parse(&list).unwrap();
        assert_eq!((words.notices.len(), &words.rest[..]), (notices, &rest.iter().map(OsString::from).collect::<Vec<_>>()[..]), "{:?}", words.notices);
        // What builds the union reads its words again.
        let own = Words::join(words.own.iter().map(|word| word.as_os_str()));
        let again = Words::parse(&own).unwrap();
        assert_eq!(format!("{:?}", again.options), format!("{:?}", words.options), "{list}: {own:?}");
        assert!(again.rest.is_empty() && again.acl.is_none());
    }
}

#[test]
fn words_of_pools_say_what_holds() {
    use crate::Ignored;
    for (list, holds) in [
        (
            "category.create=pfrd",
            (|words| words.pool && words.options.sum && words.options.actions.are_everywhere(crate::Action::Chmod))
                as fn(&Words) -> bool,
        ),
        ("create=pfrd", |words| {
            !words.pool && !words.options.sum && !words.options.actions.are_everywhere(crate::Action::Chmod)
        }),
        ("category.action=epff", |words| words.pool && !words.options.actions.are_everywhere(crate::Action::Chmod)),
        ("category.action=all", |words| words.options.actions.are_everywhere(crate::Action::Chmod)),
        ("func.getattr=newest", |words| words.options.newest_times),
        ("func.getattr=newest,category.search=ff", |words| !words.options.newest_times),
        ("func.mkdir=epmfs", |words| words.options.create_directories == Some("epmfs".parse().unwrap())),
        ("func.mkdir=epmfs,category.create=ff", |words| words.options.create_directories.is_none()),
        ("category.create=all", |words| words.options.create == "ff".parse().unwrap()),
        ("moveonenospc=true", |words| words.options.move_when_full == Some("mfs".parse().unwrap())),
        ("moveonenospc=lus", |words| words.options.move_when_full == Some("lus".parse().unwrap())),
        ("moveonenospc=false", |words| words.options.move_when_full.is_none()),
        ("statfs=full,statfs-ignore=nc", |words| {
            words.options.sum && words.options.figures_of_path && words.options.figures_ignored == Ignored::NoCreate
        }),
        ("statfs_ignore=ro", |words| words.options.figures_ignored == Ignored::ReadOnly),
        ("posix_acl=true", |words| words.acl == Some(true)),
        ("posix-acl=false", |words| words.acl == Some(false)),
        ("security_capability=false", |words| !words.options.capabilities),
        ("branches=/a:/b=NC", |words| words.branches.iter().map(|(_, mode)| mode.to_string()).eq(["rw", "nc"])),
    ] {
        assert!(holds(&parse(list).unwrap()), "{list}");
    }
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
        ("link_cow=true", |words| words.options.link_cow && words.options.symlinkify.is_none()),
        ("link-cow=true,link-cow=false,symlinkify_timeout=5", |words| {
            !words.options.link_cow && words.options.symlinkify.is_none()
        }),
        ("symlinkify=true", |words| words.options.symlinkify == Some(Duration::from_secs(3600))),
        ("symlinkify-timeout=5,symlinkify=true", |words| words.options.symlinkify == Some(Duration::from_secs(5))),
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
        ("category.search=best", "there is no such policy"),
        ("category.open=ff", "there are category.create"),
        ("func.look=ff", "there is no such function"),
        ("func.readdir=cor:x", "seq, cosr[:N[:M]]"),
        ("moveonenospc=maybe", "there is no such policy"),
        ("threads=many", "a whole number"),
        ("symlinkify=1", "there are true, false"),
        ("statfs=all", "there are base, full"),
        ("statfs_ignore=rw", "there are none, ro, nc"),
        ("rename_exdev=symlink", "there are passthrough, rel-symlink"),
        ("link_cow=yes", "there are true, false"),
        ("symlinkify-timeout=soon", "a number of seconds"),
        ("nullrw=true", "never thrown away"),
        ("follow-symlinks=all", "as root"),
        ("config=/etc/x", "write them after -o"),
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
        assert!(
            row(word).is_some_and(|row| row.contains("refused")),
            "docs/union.md does not say that {word} is refused"
        );
    }
    for (word, ..) in pool::IGNORED_WORDS {
        assert!(row(word).is_some(), "docs/union.md does not name {word}");
    }
    for (word, _) in pool::IMPOSSIBLE {
        assert!(
            row(word).is_some_and(|row| row.contains("refused")),
            "docs/union.md does not say that {word} is refused"
        );
    }
    let obeyed = [
        "func.getattr=",
        "func.mkdir=",
        "link-cow=",
        "symlinkify=",
        "symlinkify-timeout=",
        "moveonenospc=",
        "statfs=",
        "statfs-ignore=",
        "posix-acl=",
        "security-capability=",
        "passthrough.io=",
        "umask=",
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
