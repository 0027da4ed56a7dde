//! Every option of the table: the settings that it changes, in each of its spellings.

use super::{bare, os};
use crate::{
    libfuse_args::{self, Unknown},
    options::{Opt, Spelling, TABLE},
    settings::Settings,
};
use nacre_daemon::{
    cage::engine::FileSystem,
    log::target::LogTarget,
    plan::{Atime, Engine, Transport, Verbosity},
};
use nacre_layers::size::Size;
use nacre_stack::spec::{
    ChangePolicy, CreateAs, HostCoherence, SymlinkDeletion, Symlinks, WhenFull, Writes, XattrPolicy,
};
use std::time::Duration;

type Edit = fn(&mut Settings);

/// Option, a value for it, and the change of the settings.
const CASES: &[(Opt, &str, Edit)] = &[
    (Opt::ForceUser, "5", |s| s.remap.force_user = Some("5".into())),
    (Opt::ForceGroup, "adm", |s| s.remap.force_group = Some("adm".into())),
    (Opt::Mirror, "a:@b", |s| s.remap.mirror = Some("a:@b".into())),
    (Opt::MirrorOnly, "a:@b", |s| s.remap.mirror_only = Some("a:@b".into())),
    (Opt::Map, "1/2:@3/@4", |s| s.remap.map = Some("1/2:@3/@4".into())),
    (Opt::MapPasswd, "/p", |s| s.remap.map_passwd = Some("/p".into())),
    (Opt::MapPasswdRev, "/p", |s| s.remap.map_passwd_rev = Some("/p".into())),
    (Opt::MapGroup, "/p", |s| s.remap.map_group = Some("/p".into())),
    (Opt::MapGroupRev, "/p", |s| s.remap.map_group_rev = Some("/p".into())),
    (Opt::UidOffset, "100000", |s| s.remap.uid_offset = Some(100_000)),
    (Opt::GidOffset, "-5", |s| s.remap.gid_offset = Some(-5)),
    (Opt::User, "5", |s| {
        s.remap.force_user = Some("5".into());
        s.warnings.push("--user is deprecated: write --force-user".into());
    }),
    (Opt::Owner, "5", |s| {
        s.remap.force_user = Some("5".into());
        s.warnings.push("--owner is deprecated: write --force-user".into());
    }),
    (Opt::Group, "5", |s| {
        s.remap.force_group = Some("5".into());
        s.warnings.push("--group is deprecated: write --force-group".into());
    }),
    (Opt::Perms, "u=rwX:g=rD:o=", |s| s.remap.perms = Some("u=rwX:g=rD:o=".into())),
    (Opt::RealisticPermissions, "", |s| s.remap.realistic_permissions = true),
    (Opt::For, "d:perms=0755", |s| s.remap.for_types = vec!["d:perms=0755".into()]),
    (Opt::Hide, "*.tmp", |s| s.remap.hide = vec!["*.tmp".into()]),
    (Opt::CreateAsUser, "", |s| s.remap.create_as = CreateAs::User),
    (Opt::CreateAsMounter, "", |s| s.remap.create_as = CreateAs::Mounter),
    (Opt::CreateForUser, "5", |s| s.remap.create_for_user = Some("5".into())),
    (Opt::CreateForGroup, "5", |s| s.remap.create_for_group = Some("5".into())),
    (Opt::CreateWithPerms, "o=", |s| s.remap.create_with_perms = Some("o=".into())),
    (Opt::ChownNormal, "", |_| ()),
    (Opt::ChownIgnore, "", |s| s.remap.chown = ChangePolicy::Ignore),
    (Opt::ChownDeny, "", |s| s.remap.chown = ChangePolicy::Deny),
    (Opt::ChgrpNormal, "", |_| ()),
    (Opt::ChgrpIgnore, "", |s| s.remap.chgrp = ChangePolicy::Ignore),
    (Opt::ChgrpDeny, "", |s| s.remap.chgrp = ChangePolicy::Deny),
    (Opt::ChmodNormal, "", |_| ()),
    (Opt::ChmodIgnore, "", |s| s.remap.chmod = ChangePolicy::Ignore),
    (Opt::ChmodDeny, "", |s| s.remap.chmod = ChangePolicy::Deny),
    (Opt::ChmodFilter, "a-w", |s| s.remap.chmod_filter = Some("a-w".into())),
    (Opt::ChmodAllowX, "", |s| s.remap.chmod_allow_x = true),
    (Opt::XattrRw, "", |_| ()),
    (Opt::XattrRo, "", |s| s.remap.xattr = XattrPolicy::Ro),
    (Opt::XattrNone, "", |s| {
        s.remap.xattr = XattrPolicy::None;
        s.door.xattr = false;
        s.door.acl = false;
    }),
    (Opt::Xattr, "ro", |s| s.remap.xattr = XattrPolicy::Ro),
    (Opt::Acl, "off", |s| s.door.acl = false),
    (Opt::DeleteDeny, "", |s| s.remap.delete_deny = true),
    (Opt::RenameDeny, "", |s| s.remap.rename_deny = true),
    (Opt::ReplaceDeny, "", |s| s.remap.replace_deny = true),
    (Opt::TruncateDeny, "", |s| s.remap.truncate_deny = true),
    (Opt::HideHardLinks, "", |s| s.remap.hide_hard_links = true),
    (Opt::ResolveSymlinks, "", |s| s.host.symlinks = Symlinks::Resolve),
    (Opt::ResolvedSymlinkDeletion, "target-first", |s| s.host.symlink_deletion = SymlinkDeletion::TargetFirst),
    (Opt::BlockDevicesAsFiles, "", |s| s.remap.block_devices_as_files = true),
    (Opt::CtimeFromMtime, "", |s| s.remap.ctime_from_mtime = true),
    (Opt::ReadRate, "1.5M", |s| s.throttle.read_rate = Some("1.5M".into())),
    (Opt::WriteRate, "4k", |s| s.throttle.write_rate = Some("4k".into())),
    (Opt::Multithreaded, "", |_| ()),
    (Opt::EnableLockForwarding, "", |s| s.door.lock_forwarding = true),
    (Opt::DisableLockForwarding, "", |_| ()),
    (Opt::EnableIoctl, "", |s| s.host.ioctl = true),
    (Opt::DirectIo, "", |s| s.door.direct_io = true),
    (Opt::NoDirectIo, "", |_| ()),
    (Opt::LibfuseDirectIo, "", |s| s.door.direct_io = true),
    (Opt::ForwardOdirect, "4096", |s| s.host.forward_odirect = Some(4096)),
    (Opt::Coherence, "revalidate", |s| s.host.coherence = HostCoherence::Revalidate),
    (Opt::Immutable, "", |s| {
        s.door.immutable = true;
        s.door.read_only = true;
        s.host.coherence = HostCoherence::Exclusive;
    }),
    (Opt::NoOpen, "", |s| (s.door.no_open, s.door.read_only) = (true, true)),
    (Opt::NotifyWatchers, "", |s| s.door.notify_watchers = true),
    (Opt::Survive, "", |s| s.door.survive = true),
    (Opt::Engine, "kernel", |s| s.engine = Engine::Kernel),
    (Opt::Passthrough, "off", |s| s.door.passthrough = false),
    (Opt::Transport, "device", |s| s.door.transport = Transport::Device),
    (Opt::Size, "1.5G", |s| s.cage.size = Some(Size::new(3 << 29))),
    (Opt::Inodes, "5000", |s| s.cage.inodes = Some(5000)),
    (Opt::WhenFull, "drop-oldest", |s| s.cage.when_full = WhenFull::DropOldest),
    (Opt::Rotated, "*.gz", |s| s.cage.rotated = vec!["*.gz".into()]),
    (Opt::Keep, "audit*", |s| s.cage.keep = vec!["audit*".into()]),
    (Opt::Soft, "80%", |s| s.cage.soft = Some("80%".into())),
    (Opt::OnSoft, "logger full", |s| s.cage.on_soft = Some("logger full".into())),
    (Opt::Limit, "user:www-data=2G", |s| s.cage.limits = vec!["user:www-data=2G".into()]),
    (Opt::Writes, "through", |s| s.cage.writes = Writes::Through),
    (Opt::State, "/s", |s| s.cage.state = Some("/s".into())),
    (Opt::FsType, "xfs", |s| s.cage.fstype = Some(FileSystem::Xfs)),
    (Opt::Image, "/i", |s| s.cage.image = Some("/i".into())),
    (Opt::Sparse, "", |s| s.cage.sparse = true),
    (Opt::NoAllowOther, "", |s| s.door.allow_other = false),
    (Opt::ReadOnly, "", |s| s.door.read_only = true),
    (Opt::Foreground, "", |s| s.foreground = true),
    (Opt::Debug, "", |s| {
        s.debug = true;
        s.foreground = true;
    }),
    (Opt::SingleThread, "", |_| ()),
    (Opt::Explain, "", |s| s.explain = true),
    (Opt::Log, "trace", |s| s.log = Some(Verbosity::Trace)),
    (Opt::Daemon, "pool", |s| s.daemon = Some("pool".into())),
    (Opt::LogFile, "/l", |s| s.log_target = Some(LogTarget::File("/l".into()))),
    (Opt::LogTarget, "journal", |s| s.log_target = Some(LogTarget::Journal)),
    (Opt::Help, "", |s| s.help = true),
    (Opt::Version, "", |s| s.version = true),
    (Opt::FuseVersion, "", |s| s.fuse_version = true),
    (Opt::Words, "ro", |s| s.door.read_only = true),
    (Opt::Ro, "", |s| s.door.read_only = true),
    (Opt::Rw, "", |_| ()),
    (Opt::Suid, "", |s| s.door.suid = true),
    (Opt::NoSuid, "", |_| ()),
    (Opt::Dev, "", |s| s.door.dev = true),
    (Opt::NoDev, "", |_| ()),
    (Opt::Exec, "", |_| ()),
    (Opt::NoExec, "", |s| s.door.exec = false),
    (Opt::SymFollow, "", |_| ()),
    (Opt::NoSymFollow, "", |s| s.door.symfollow = false),
    (Opt::Atime, "", |_| ()),
    (Opt::NoAtime, "", |s| s.door.atime = Some(Atime::No)),
    (Opt::RelAtime, "", |s| s.door.atime = Some(Atime::Relative)),
    (Opt::StrictAtime, "", |s| s.door.atime = Some(Atime::Strict)),
    (Opt::DirAtime, "", |_| ()),
    (Opt::NoDirAtime, "", |s| s.door.nodiratime = true),
    (Opt::Sync, "", |s| s.door.sync = true),
    (Opt::Async, "", |_| ()),
    (Opt::DirSync, "", |s| s.door.dirsync = true),
    (Opt::AllowOther, "", |s| s.door.others_asked = true),
    (Opt::DefaultPermissions, "", |_| ()),
    (Opt::FsName, "x", |s| s.door.fsname = Some("x".into())),
    (Opt::Subtype, "x", |s| s.door.subtype = Some("x".into())),
    (Opt::MaxRead, "4096", |_| ()),
    (Opt::EntryTimeout, "0.5", |s| s.door.entry_timeout = Some(Duration::from_millis(500))),
    (Opt::AttrTimeout, "2", |s| s.door.attr_timeout = Some(Duration::from_secs(2))),
    (Opt::NegativeTimeout, "0", |s| s.door.negative_timeout = Some(Duration::ZERO)),
    (Opt::AutoUnmount, "", |_| ()),
    (Opt::SecurityContext, "system_u:object_r:x_t:s0", |s| {
        s.door.kernel_words = vec!["context=system_u:object_r:x_t:s0".into()]
    }),
    (Opt::FsContext, "x", |s| s.door.kernel_words = vec!["fscontext=x".into()]),
    (Opt::DefContext, "x", |s| s.door.kernel_words = vec!["defcontext=x".into()]),
    (Opt::RootContext, "x", |s| s.door.kernel_words = vec!["rootcontext=x".into()]),
    (Opt::NonEmpty, "", |s| s.nonempty = true),
    (Opt::Remount, "", |s| s.remount = true),
];

/// Options whose effect is not one field: tested by name below.
const ELSEWHERE: &[Opt] = &[Opt::AllowRoot, Opt::ShownUid, Opt::ShownGid, Opt::Umask];

fn fold(arguments: &[&str]) -> Result<Settings, String> {
    let words = libfuse_args::parse(os(arguments), Unknown::Refuse).map_err(|failure| failure.what)?;
    assert_eq!(words.positionals, os(&[]), "{arguments:?}");
    Settings::fold(&words.given).map(bare).map_err(|failure| failure.what)
}

#[test]
fn each_option_is_tested() {
    for row in TABLE {
        let known = CASES.iter().any(|(option, ..)| *option == row.id) || ELSEWHERE.contains(&row.id);
        assert!(known, "no case for {:?}", row.id);
    }
}

#[test]
fn each_option_sets_what_it_says_in_each_spelling() {
    for (option, value, edit) in CASES {
        let row = TABLE.iter().find(|row| row.id == *option).unwrap();
        let mut expected = Settings::default();
        edit(&mut expected);
        let mut spellings: Vec<Vec<String>> = Vec::new();
        if row.spelling != Spelling::Word && !row.name.is_empty() {
            spellings.push(vec![if row.value.is_some() {
                format!("--{}={value}", row.name)
            } else {
                format!("--{}", row.name)
            }]);
        }
        if let Some(letter) = row.short {
            spellings.push(if row.value.is_some() {
                vec![format!("-{letter}{value}")]
            } else {
                vec![format!("-{letter}")]
            });
            if row.value.is_some() {
                spellings.push(vec![format!("-{letter}"), (*value).to_owned()]);
            }
        }
        // `-o user=` is fstab's; everything else is a word, too.
        if row.spelling != Spelling::Letter && *option != Opt::User {
            let word = if row.value.is_some() { format!("{}={value}", row.name) } else { row.name.to_owned() };
            spellings.push(vec![format!("-o{word}")]);
            spellings.push(vec!["-o".to_owned(), format!("defaults,{word},_netdev")]);
        }
        assert!(!spellings.is_empty(), "{option:?}");
        for spelling in spellings {
            let arguments: Vec<&str> = spelling.iter().map(String::as_str).collect();
            assert_eq!(fold(&arguments), Ok(expected.clone()), "{arguments:?}");
        }
    }
}

#[test]
fn a_switch_takes_no_value_and_a_valued_option_needs_one() {
    for row in TABLE.iter().filter(|row| row.spelling != Spelling::Word && !row.name.is_empty()) {
        let (argument, says) = match row.value {
            None => (format!("--{}=1", row.name), "takes no value"),
            Some(_) => (format!("--{}", row.name), "needs a value"),
        };
        let error = fold(&[&argument]).unwrap_err();
        assert!(error.contains(says) && error.contains(row.name), "{argument}: {error}");
    }
    for row in
        TABLE.iter().filter(|row| row.spelling != Spelling::Letter && !["user", "owner", "group"].contains(&row.name))
    {
        let (word, says) = match row.value {
            None => (format!("{}=1", row.name), "takes no value"),
            Some(_) => (row.name.to_owned(), "needs a value"),
        };
        let error = fold(&["-o", &word]).unwrap_err();
        assert!(error.contains(says) && error.contains(row.name), "{word}: {error}");
    }
}

#[test]
fn the_last_one_wins() {
    for (arguments, line) in [
        (&["-u5", "--force-user=6"][..], "force-user=6"),
        (&["-p0400", "-o", "perms=0500"], "perms=0500"),
        (&["--chown-deny", "--chown-ignore"], "chown=ignore"),
        (&["--chmod-deny", "-o", "chmod-ignore"], "chmod=ignore"),
        (&["--xattr-ro", "--xattr-rw", "-u1"], "force-user=1"),
        (&["--create-as-user", "--create-as-mounter"], "create-as=mounter"),
        (&["--map=1/2", "--map=3/4"], "map=3/4"),
        (&["-u", "7", "--user=5"], "force-user=7"),
        (&["--group=5", "-g8"], "force-group=8"),
    ] {
        let layers = fold(arguments).unwrap().layers("/s".into());
        let printed = nacre_stack::spec::StackSpec { layers }.to_line();
        assert_eq!(printed, format!("host:/s | remap:{line}"), "{arguments:?}");
    }
    assert!(!fold(&["-r", "-o", "rw"]).unwrap().door.read_only);
    assert!(fold(&["-o", "rw,ro"]).unwrap().door.read_only);
    assert!(fold(&["-o", "nodev,nosuid,dev,suid"]).unwrap().door.suid);
    assert!(fold(&["--no-allow-other", "-o", "allow_other"]).unwrap().door.allow_other);
}

#[test]
fn a_deprecated_option_is_warned_of_once() {
    let folded = fold(&["--user=5", "--user=6", "-o", "user=7", "--owner=8"]).unwrap();
    let expected = ["user", "owner"].map(|name| format!("--{name} is deprecated: write --force-user"));
    assert_eq!(folded.warnings, expected);
}

#[test]
fn words_of_fstab_and_libfuse_are_dropped() {
    let words = "rw,user,nouser,users,auto,noauto,nofail,_netdev,defaults,x-systemd.automount,x-gvfs-show,X-mount.mkdir=755,owner,group,\
                 user=joe,comment=x,big_writes,nomtab,use_ino,kernel_cache,auto_cache,ac_attr_timeout=1,remember=5,intr,intr_signal=5,\
                 hard_remove,noforget,async_read,sync_read,max_write=4096,max_readahead=4096,max_background=5,congestion_threshold=5,\
                 clone_fd,splice_read,no_splice_move,no_remote_lock,readdir_ino,atomic_o_trunc,,";
    assert_eq!(fold(&["-o", words]), Ok(Settings::default()));
}

#[test]
fn libfuse_overrides_what_is_shown() {
    let settings = fold(&["-u", "1", "--mirror=a", "-p", "a+X", "-o", "uid=5,gid=6,umask=027"]).unwrap();
    assert_eq!(settings.remap.force_user.as_deref(), Some("5"));
    assert_eq!(settings.remap.force_group.as_deref(), Some("6"));
    assert_eq!(settings.remap.perms.as_deref(), Some("a+X:0750"));
    assert_eq!(settings.remap.mirror, None);
    assert!(fold(&["-o", "uid=4294967294"]).is_ok());
}

#[test]
fn wrong_values_are_errors() {
    for (arguments, says) in [
        (&["--bogus"][..], "unknown option --bogus"),
        (&["-z"], "unknown option -z"),
        (&["-fd"], "unknown option -fd"),
        (&["-fxyz"], "option -f takes no value"),
        (&["-u"], "option -u needs a value"),
        (&["-o"], "option -o needs a value"),
        (&["-o", "bogus"], "unknown option -o bogus"),
        (&["-o", "bogus=1"], "unknown option -o bogus"),
        (&["-o", "help"], "unknown option -o help"),
        (&["-o", "modules=subdir"], "-o modules is not possible"),
        (&["-o", "blkdev"], "-o blkdev is not possible"),
        (&["-o", "allow_root"], "-o allow_root is not possible"),
        (&["--force-user="], "force-user: \"\" is not a user or group"),
        (&["-o", "force-group="], "force-group: \"\" is not a user or group"),
        (&["--perms=8"], "perms: "),
        (&["-p", "0888"], "perms: "),
        (&["-p", "u=rwx,,g=r"], "perms: "),
        (&["--create-with-perms=z"], "create-with-perms: "),
        (&["--chmod-filter=1777"], "chmod-filter: "),
        (&["--read-rate=fast"], "read-rate: "),
        (&["--write-rate=-1"], "write-rate: "),
        (&["--write-rate="], "write-rate: "),
        (&["--uid-offset=abc"], "uid-offset: \"abc\" is not a whole number"),
        (&["--forward-odirect=0"], "forward-odirect: \"0\" is not an alignment"),
        (&["--resolved-symlink-deletion=maybe"], "is not one of symlink-only, deny, symlink-first, target-first"),
        (&["--coherence=maybe"], "is not one of watch, exclusive, revalidate"),
        (&["--engine=maybe"], "is not one of fuse, kernel, auto"),
        (&["--transport=maybe"], "is not one of auto, uring, device"),
        (&["--xattr=maybe"], "is not one of rw, ro, none"),
        (&["--acl=maybe"], "is not one of auto, off"),
        (&["--log=maybe"], "is not one of error, warn, info, debug, trace"),
        (&["-o", "umask=888"], "umask: \"888\" is not an octal mask"),
        (&["-o", "uid=-1"], "uid: \"-1\" is not a whole number"),
        (&["-o", "attr_timeout=-1"], "attr_timeout: \"-1\" is not a number of seconds"),
        (&["-o", "attr_timeout=inf"], "is not a number of seconds"),
        (&["-m", "a", "-M", "b"], "--mirror and --mirror-only exclude each other"),
        (&["-M", "a", "-o", "uid=5"], "exclude each other"),
    ] {
        match fold(arguments) {
            Err(error) => assert!(error.contains(says), "{arguments:?}: {error}"),
            Ok(settings) => panic!("{arguments:?} was taken: {settings:?}"),
        }
    }
}

#[test]
fn a_backslash_takes_commas_into_a_word() {
    for (text, fsname) in
        [(r"fsname=a\,b", "a,b"), (r"fsname=a\\b", r"a\b"), (r"fsname=a\054b", "a,b"), (r"fsname=a\040b", "a b")]
    {
        assert_eq!(fold(&["-o", text]).unwrap().door.fsname.as_deref(), Some(fsname), "{text}");
    }
}

#[test]
fn names_and_letters_are_unique() {
    for (place, row) in TABLE.iter().enumerate() {
        for other in &TABLE[..place] {
            assert!(row.name.is_empty() || row.name != other.name || other.spelling != row.spelling, "{}", row.name);
            assert!(row.short.is_none() || row.short != other.short, "{:?}", row.short);
        }
    }
}
