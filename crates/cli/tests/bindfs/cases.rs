//! What each option does, as a shell script that looks at a mount, and what it has to print.
//!
//! The scripts run in the mount, as root, with `$SRC` and `$MNT` set and these words: `st NAME` prints owner, group and mode; `as ID
//! COMMAND...` runs a command as that user and group alone; `try COMMAND...` prints `ok` or `refused`.

/// An option under test.
pub struct Case {
    /// As it stands in the first column of docs/bindfs.md.
    pub option: &'static str,
    /// The words of the command line before the two paths.
    pub words: &'static [&'static str],
    /// What is done in the mount.
    pub script: &'static str,
    /// What that prints.
    pub wanted: &'static str,
    /// Whether bindfs 1.14.7 (Debian 12) has to print the same.
    pub rival: bool,
}

const fn case(option: &'static str, words: &'static [&'static str], script: &'static str, wanted: &'static str, rival: bool) -> Case {
    Case { option, words, script, wanted, rival }
}

/// The source that every script starts from.
pub const SOURCE: &str = "echo content > file; chmod 644 file; mkdir dir; chmod 755 dir; ln -s file link; \
    echo other > other; chown 1000:1001 other; chmod 640 other; mkdir open; chmod 777 open; chmod 755 .";

/// The cases, in the order of the documentation.
pub const CASES: &[Case] = &[
    case("--force-user", &["--force-user=4711"], "st file other", "4711:0 644\n4711:1001 640", true),
    case("-u", &["-u4711"], "st other", "4711:1001 640", true),
    case("--force-group", &["--force-group=4712"], "st file other", "0:4712 644\n1000:4712 640", true),
    case("-g", &["-g", "4712"], "st other", "1000:4712 640", true),
    case("--user", &["--user=4711"], "st file", "4711:0 644", false),
    case("--owner", &["--owner=4711"], "st file", "4711:0 644", true),
    case("--group", &["--group=4712"], "st file", "0:4712 644", true),
    case(
        "--mirror",
        &["--mirror=2000:2001"],
        "as 2000 st file; as 2001 st file; as 2002 st file; st file",
        "2000:0 644\n2001:0 644\n0:0 644\n0:0 644",
        true,
    ),
    case("-m", &["-m", "2000"], "as 2000 st other; as 2001 st other", "2000:1001 640\n1000:1001 640", true),
    case("--mirror-only", &["--mirror-only=2000"], "as 2000 st file; as 2001 try cat file; st file", "2000:0 644\nrefused\n0:0 644", true),
    case("-M", &["-M2000"], "as 2000 cat file; as 2001 try ls .", "content\nrefused", true),
    case(
        "--map",
        &["--map=1000/2000:@1001/@3001"],
        "st file other; chown 2000:3001 file; stat -c %u:%g $SRC/file; as 2000 touch open/new; stat -c %u $SRC/open/new",
        "0:0 644\n2000:3001 640\n1000:1001\n1000",
        true,
    ),
    case("--map-passwd", &["--map-passwd=PASSWD"], "st other", "65534:1001 640", true),
    case("--map-passwd-rev", &["--map-passwd-rev=PASSWD"], "chown 65534 $SRC/file; sleep 1.1; st file", "1000:0 644", false),
    case("--map-group", &["--map-group=GROUP"], "st other", "1000:65534 640", true),
    case("--map-group-rev", &["--map-group-rev=GROUP"], "chgrp 65534 $SRC/file; sleep 1.1; st file", "0:1001 644", false),
    case(
        "--uid-offset",
        &["--uid-offset=100"],
        "st other; chown 1105 other; stat -c %u $SRC/other; as 2100 touch open/new; stat -c %u $SRC/open/new; touch roots; stat -c %u $SRC/roots roots",
        "1100:1001 640\n1005\n2000\n0\n100",
        true,
    ),
    case(
        "--uid-offset",
        &["--uid-offset=-1000"],
        "st other; ls -n file | cut -c1-10; cat file; stat -c %u file; chown 5 file; stat -c %u $SRC/file",
        "0:1001 640\n-rw-r--r--\ncontent\n65534\n1005",
        false,
    ),
    case("--gid-offset", &["--gid-offset=100"], "st other; chgrp 1105 other; stat -c %g $SRC/other", "1000:1101 640\n1005", true),
    case("--perms", &["--perms=0640,a+X"], "st file dir", "0:0 640\n0:0 751", true),
    case("-p", &["-p", "u=rwX:g=rD:o="], "st file dir other; as 2000 try cat file", "0:0 640\n0:0 750\n1000:1001 640\nrefused", true),
    case("--realistic-permissions", &["-p", "0777", "--realistic-permissions"], "st file dir", "0:0 666\n0:0 777", true),
    case(
        "--create-as-user",
        &["--create-as-user"],
        "as 2000 sh -c 'touch open/f; mkdir open/d; ln -s x open/s'; stat -c %u:%g $SRC/open/*",
        "2000:2000\n2000:2000\n2000:2000",
        true,
    ),
    case("--create-as-mounter", &["--create-as-mounter"], "as 2000 sh -c ': > open/f'; stat -c %u:%g $SRC/open/f", "0:0", true),
    case(
        "--create-for-user",
        &["--create-for-user=4711"],
        "as 2000 mkdir open/d; stat -c %u $SRC/open/d; touch f; stat -c %u $SRC/f",
        "4711\n4711",
        true,
    ),
    case(
        "--create-for-group",
        &["--create-for-group=4712"],
        "as 2000 mkdir open/d; stat -c %g $SRC/open/d; touch f; stat -c %g $SRC/f",
        "4712\n4712",
        true,
    ),
    case(
        "--create-with-perms",
        &["--create-with-perms=g=rX:o="],
        "umask 022; touch f; mkdir d; stat -c %a $SRC/f $SRC/d",
        "640\n750",
        true,
    ),
    case("--chown-normal", &["--chown-normal"], "try chown 5 file; stat -c %u $SRC/file", "ok\n5", true),
    case("--chown-ignore", &["--chown-ignore"], "try chown 5:6 file; stat -c %u:%g $SRC/file", "ok\n0:6", true),
    case(
        "--chown-deny",
        &["--chown-deny"],
        "try chown 5 file; try chown 5:6 file; try chgrp 6 file; stat -c %u:%g $SRC/file",
        "refused\nrefused\nok\n0:6",
        true,
    ),
    case("--chgrp-normal", &["--chgrp-normal"], "try chgrp 6 file; stat -c %g $SRC/file", "ok\n6", true),
    case("--chgrp-ignore", &["--chgrp-ignore"], "try chown 5:6 file; stat -c %u:%g $SRC/file", "ok\n5:0", true),
    case(
        "--chgrp-deny",
        &["--chgrp-deny"],
        "try chgrp 6 file; try chown 5:6 file; try chown 5 file; stat -c %u:%g $SRC/file",
        "refused\nrefused\nok\n5:0",
        true,
    ),
    case("--chmod-normal", &["--chmod-normal"], "try chmod 600 file; stat -c %a $SRC/file", "ok\n600", true),
    case("--chmod-ignore", &["--chmod-ignore"], "try chmod 600 file; try chmod 755 file; stat -c %a $SRC/file", "ok\nok\n644", true),
    case("--chmod-deny", &["--chmod-deny"], "try chmod 600 file; stat -c %a $SRC/file", "refused\n644", true),
    case(
        "--chmod-filter",
        &["--chmod-filter=a-w"],
        "try chmod 666 file; try chmod 700 dir; stat -c %a $SRC/file $SRC/dir",
        "ok\nok\n444\n500",
        true,
    ),
    case(
        "--chmod-allow-x",
        &["--chmod-ignore", "--chmod-allow-x"],
        "try chmod 755 file; try chmod 600 other; try chmod 700 dir; stat -c %a $SRC/file $SRC/other $SRC/dir",
        "ok\nok\nok\n755\n640\n755",
        true,
    ),
    case(
        "--xattr-rw",
        &["--xattr-rw"],
        "try setfattr -n user.a -v b file; getfattr --only-values -n user.a $SRC/file 2>/dev/null",
        "ok\nb",
        true,
    ),
    case(
        "--xattr-ro",
        &["--xattr-ro"],
        "setfattr -n user.a -v b $SRC/file; getfattr --only-values -n user.a file; echo; try setfattr -n user.a -v c file; try setfattr -x user.a file",
        "b\nrefused\nrefused",
        true,
    ),
    case(
        "--xattr-none",
        &["--xattr-none"],
        "setfattr -n user.a -v b $SRC/file; try getfattr -n user.a file; try setfattr -n user.c -v d file",
        "refused\nrefused",
        true,
    ),
    case(
        "--delete-deny",
        &["--delete-deny"],
        "try rm -f file; try rmdir dir; try mv other file; ls",
        "refused\nrefused\nok\ndir\nfile\nlink\nopen",
        true,
    ),
    case("--rename-deny", &["--rename-deny"], "try mv file new; try rm -f other; ls", "refused\nok\ndir\nfile\nlink\nopen", true),
    case("--hide-hard-links", &["--hide-hard-links"], "ln $SRC/file $SRC/two; sleep 1.1; stat -c %h file two $SRC/file", "1\n1\n2", true),
    case(
        "--resolve-symlinks",
        &["--resolve-symlinks"],
        "stat -c %F link; try ln -s x new; ln -s nowhere $SRC/broken; sleep 1.1; stat -c %F broken",
        "regular file\nrefused\nsymbolic link",
        true,
    ),
    case(
        "--resolved-symlink-deletion",
        &["--resolve-symlinks", "--resolved-symlink-deletion=target-first"],
        "try rm -f link; ls",
        "ok\ndir\nopen\nother",
        true,
    ),
    case(
        "--block-devices-as-files",
        &["--block-devices-as-files"],
        "mknod $SRC/disk b 7 0; sleep 1.1; stat -c %F disk | sed 's/ empty//'",
        "regular file",
        false,
    ),
    case("--ctime-from-mtime", &["--ctime-from-mtime"], "touch -d @5 $SRC/file; sleep 1.1; stat -c '%Y %Z' file", "5 5", true),
    case("--read-rate", &["--read-rate=10M"], "cat file", "content", true),
    case("--write-rate", &["--write-rate=1.5G"], "echo new > file; cat $SRC/file", "new", true),
    case("--multithreaded", &["--multithreaded"], "cat file", "content", true),
    case(
        "--enable-lock-forwarding",
        &["--enable-lock-forwarding", "--multithreaded"],
        "exec 9<file; flock -n 9; try flock -n $SRC/file true; exec 9<&-",
        "refused",
        true,
    ),
    case(
        "--disable-lock-forwarding",
        &["--disable-lock-forwarding"],
        "exec 9<file; flock -n 9; try flock -n $SRC/file true; exec 9<&-",
        "ok",
        true,
    ),
    case(
        "--enable-ioctl",
        &["--enable-ioctl"],
        "test \"$(lsattr -d dir 2>&1 | sed 's/ .*//')\" = \"$(lsattr -d $SRC/dir 2>&1 | sed 's/ .*//')\"; echo $?",
        "0",
        false,
    ),
    case("--direct-io", &["--direct-io"], "cat file; echo more >> file; cat $SRC/file", "content\ncontent\nmore", false),
    case("--no-direct-io", &["--no-direct-io"], "cat file", "content", false),
    case(
        "--forward-odirect",
        &["--forward-odirect=4096"],
        "dd if=/dev/zero of=big bs=4096 count=4 status=none; dd if=big iflag=direct bs=4096 status=none | wc -c",
        "16384",
        true,
    ),
    case("--no-allow-other", &["--no-allow-other"], "cat file; as 2000 try cat file", "content\nrefused", true),
    case("-n", &["-n"], "cat file; as 2000 try cat file", "content\nrefused", true),
    case("-r", &["-r"], "cat file; try touch new; try rm -f file", "content\nrefused\nrefused", true),
    case("-o", &["-o", "ro,force-user=4711"], "st file; try touch new", "4711:0 644\nrefused", true),
    case("-f", &["-f"], "cat file", "content", true),
    case("-d", &["-d"], "cat file", "content", true),
    case("-s", &["-s"], "cat file", "content", true),
    case("-o fsname=", &["-o", "fsname=photos"], "findmnt -vno SOURCE $MNT", "photos", false),
    case("-o subtype=", &["-o", "subtype=photos"], "findmnt -no FSTYPE $MNT", "fuse.photos", false),
    case("-o ro", &["-o", "ro"], "try touch new; has ro", "refused\nyes", true),
    case("-o rw", &["-o", "rw"], "try touch new; has rw", "ok\nyes", true),
    case("-o dev", &["-o", "dev"], "has nodev; has nosuid", "no\nyes", true),
    case("-o suid", &["-o", "suid"], "has nosuid; has nodev", "no\nyes", true),
    case("-o noexec", &["-o", "noexec"], "has noexec; cp /bin/true t; chmod 755 t; try ./t", "yes\nrefused", true),
    case("-o noatime", &["-o", "noatime"], "has noatime", "yes", true),
    case("-o nodiratime", &["-o", "nodiratime"], "cat file", "content", false),
    case("-o direct_io", &["-o", "direct_io"], "cat file", "content", false),
    case("-o nosymfollow", &["-o", "nosymfollow"], "try cat link; readlink link", "refused\nfile", false),
    case("-o sync", &["-o", "sync"], "has sync", "yes", true),
    case("-o dirsync", &["-o", "dirsync"], "has dirsync", "yes", true),
    case("-o default_permissions", &["-o", "default_permissions"], "has default_permissions; as 2000 try cat other", "yes\nrefused", true),
    case("-o allow_other", &["-o", "allow_other"], "has allow_other; as 2000 cat file", "yes\ncontent", true),
    case("-o uid=", &["-o", "uid=4711"], "st file", "4711:0 644", true),
    case("-o gid=", &["-o", "gid=4712"], "st file", "0:4712 644", true),
    case("-o umask=", &["-o", "umask=027"], "st file dir", "0:0 750\n0:0 750", true),
    case("-o max_read=", &["-o", "max_read=65536"], "cat file", "content", false),
    case("-o entry_timeout=", &["-o", "entry_timeout=5"], "cat file", "content", true),
    case("-o attr_timeout=", &["-o", "attr_timeout=5"], "cat file", "content", true),
    case("-o negative_timeout=", &["-o", "negative_timeout=5"], "cat file", "content", true),
    case("-o auto_unmount", &["-o", "auto_unmount"], "cat file", "content", false),
    case("-o defaults", &["-o", "defaults,x-systemd.automount,nofail,_netdev"], "cat file", "content", false),
    case("-o nonempty", &["-o", "nonempty,big_writes,use_ino"], "cat file", "content", false),
    // What bindfs does not have.
    case(
        "--hide",
        &["--hide=*.key"],
        "touch $SRC/a.key $SRC/b; sleep 0.2; ls; try cat a.key; try touch c.key",
        "b\ndir\nfile\nlink\nopen\nother\nrefused\nrefused",
        false,
    ),
    case("--for", &["--for=d:perms=0700", "--for=f:force-user=4711"], "st file dir", "4711:0 644\n0:0 700", false),
    case(
        "--replace-deny",
        &["--replace-deny"],
        "try mv -f other file; try mv other new; ls",
        "refused\nok\ndir\nfile\nlink\nnew\nopen",
        false,
    ),
    case(
        "--truncate-deny",
        &["--truncate-deny"],
        "try truncate -s 2 file; try dd if=/dev/null of=file status=none; echo more >> file; cat $SRC/file",
        "refused\nrefused\ncontent\nmore",
        false,
    ),
    case("--xattr", &["--xattr=ro"], "try setfattr -n user.a -v c file", "refused", false),
    case("--acl", &["--acl=off"], "setfacl -m u:2000:r $SRC/other 2>/dev/null; as 2000 try cat other", "refused", false),
    case("--coherence", &["--coherence=revalidate"], "cat file; echo changed > $SRC/file; cat file", "content\nchanged", false),
    case("--immutable", &["--immutable"], "cat file; try touch new", "content\nrefused", false),
    case("--notify-watchers", &["--notify-watchers"], "cat file", "content", false),
    case("--engine", &["--engine=auto", "-r"], "cat file; try touch new", "content\nrefused", false),
    case("--transport", &["--transport=device"], "cat file", "content", false),
    case("--passthrough", &["--passthrough=off"], "cat file; echo more >> file; cat $SRC/file", "content\ncontent\nmore", false),
    case("--log", &["--log=info"], "cat file", "content", false),
    case("--log-file", &["--log-file=LOGFILE"], "cat file; test -e LOGFILE && echo there", "content\nthere", false),
];

/// Options that print something and mount nothing: the words, and what the text contains.
pub const PRINTING: &[(&str, &[&str], &str)] = &[
    ("-h", &["-h"], "--force-user"),
    ("--help", &["--help"], "--force-user"),
    ("-V", &["-V"], "0."),
    ("--version", &["--version"], "0."),
    ("--fuse-version", &["--fuse-version"], "7."),
    ("--explain", &["--explain", "SOURCE", "MOUNT"], "host"),
];

/// Options that are refused, with nothing mounted.
pub const REFUSED: &[(&str, &[&str])] = &[("-o allow_root", &["-o", "allow_root"]), ("-o modules=", &["-o", "modules=subdir,subdir=/"])];

/// Lines of the documentation that are tested by a function of their own.
pub const ELSEWHERE: &[&str] = &["bindfs#SOURCE", "SIGUSR1", "--daemon"];
