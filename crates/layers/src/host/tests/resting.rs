//! Idle watch: only known files are watched; a request for something new first restores the full
//! watch.

use super::{
    super::watch::{Tree, WatchGroup},
    *,
};
use nacre_testkit::needs;
use nacre_vfs::{DirEntry, DirSink, Invalidation};
use std::{
    fs,
    process::Command,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

/// A host with a mark on its file system; `None` where that is not possible.
fn watched(tree: Option<&Tree>) -> Option<(Door, Receiver<Invalidation>)> {
    watched_with(TempDir::new().unwrap(), tree)
}

fn watched_with(source: TempDir, tree: Option<&Tree>) -> Option<(Door, Receiver<Invalidation>)> {
    let door = Door::of(
        source,
        |options| {
            options.coherence = HostCoherence::Watch;
            options.tree = tree.cloned();
        },
        64,
    );
    let (sender, receiver) = channel();
    door.host.watch(sender);
    (door.host.shared.watch.method() == "fanotify").then_some((door, receiver))
}

/// Number of marks on whole file systems and on single files in the group.
fn marks(door: &Door) -> (usize, usize) {
    use std::os::fd::AsRawFd;
    let group = door.host.shared.watch.group().unwrap().as_raw_fd();
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{group}")).unwrap();
    let count = |kind: &str| information.lines().filter(|line| line.starts_with(kind)).count();
    (count("fanotify sdev:"), count("fanotify ino:"))
}

fn known(door: &Door) -> Vec<Node> {
    door.root();
    door.nodes.lock().unwrap().values().cloned().collect()
}

fn rest(door: &Door) -> bool {
    let known = known(door);
    assert!(door.host.rest(None));
    told(door, &known)
}

/// Passes the known nodes to `rest` in pieces; returns whether the host is idle.
fn told(door: &Door, known: &[Node]) -> bool {
    known.chunks(2).all(|piece| door.host.rest(Some(piece))) && door.host.rest(Some(&[]))
}

/// Makes the directory that [`heard`] changes: in this process, so that its creation causes no
/// notice that could be taken for the change's.
fn last(door: &Door) -> Entry {
    fs::create_dir(door.path("last")).unwrap();
    door.find("last").unwrap()
}

/// The notices up to a change of the attributes of `last`, made now.
fn heard(door: &Door, receiver: &Receiver<Invalidation>, last: &Entry) -> Vec<Invalidation> {
    fs::set_permissions(door.path("last"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    shell(door.source.path(), "chmod 600 last");
    let mut all = Vec::new();
    loop {
        let notice = receiver.recv_timeout(Duration::from_secs(60)).expect("the notice never came");
        if notice == (Invalidation::Attributes { id: last.attr.id }) {
            return all;
        }
        all.push(notice);
    }
}

#[test]
fn a_resting_host_hears_of_what_is_known_and_of_nothing_else() {
    needs!(is_root());
    let apart = Apart::new();
    let Some((door, receiver)) = watched_with(apart.directory(), None) else { return };
    let elsewhere = apart.directory();
    shell(
        door.source.path(),
        "mkdir directory unknown; echo 1 > directory/file; echo 1 > linked; echo 1 > open; ln -s x link; mkfifo fifo",
    );
    shell(elsewhere.path(), &format!("ln {} linked", door.path("linked").display()));
    let last = last(&door);
    let [directory, file, linked] = ["directory", "directory/file", "linked"].map(|path| door.find(path).unwrap());
    let others = ["link", "fifo"].map(|path| door.find(path).unwrap());
    let open = door.open("open", OpenFlags::READ.raw()).unwrap();
    let unlinked = door.find("open").unwrap();
    let outside = fs::OpenOptions::new().append(true).open(door.path("open")).unwrap();
    door.unlink("open").unwrap();
    heard(&door, &receiver, &last);
    assert!(rest(&door));
    assert_eq!(marks(&door), (0, known(&door).len()));
    // Ten thousand changes elsewhere, and not one notice.
    heard(&door, &receiver, &last);
    shell(
        elsewhere.path(),
        "i=0; while [ $i -lt 5000 ]; do : > f$i; echo x >> f$i; i=$((i+1)); done; mkdir d; mv f1 d; rm f2",
    );
    shell(&door.path("unknown"), "echo x > file; rm file");
    assert_eq!(heard(&door, &receiver, &last), []);
    // Known files, however they change.
    let content = |entry: &Entry| Invalidation::Content { id: entry.attr.id };
    let changes: [(&str, Invalidation); 7] = [
        ("echo 2 >> directory/file", content(&file)),
        (&format!("echo 2 >> {}/linked", elsewhere.path().display()), content(&linked)),
        ("touch directory/new", Invalidation::Entry { parent: directory.attr.id, name: Box::from(&b"new"[..]) }),
        (
            "mv directory/new directory/newer",
            Invalidation::Entry { parent: directory.attr.id, name: Box::from(&b"newer"[..]) },
        ),
        ("chmod 700 directory", Invalidation::Attributes { id: directory.attr.id }),
        ("chmod 600 fifo", Invalidation::Attributes { id: others[1].attr.id }),
        ("chown -h 1 link", Invalidation::Attributes { id: others[0].attr.id }),
    ];
    for (script, notice) in changes {
        shell(door.source.path(), script);
        let all = heard(&door, &receiver, &last);
        assert!(all.contains(&notice), "{script}: {all:?}");
    }
    assert!(succeeds(Command::new("sh").args(["-c", "echo more"]).stdout(outside)));
    assert!(heard(&door, &receiver, &last).contains(&content(&unlinked)));
    drop(open);
    // Queries about known files change nothing; a look-up ends idleness.
    door.getattr(&file.node).unwrap();
    assert_eq!(marks(&door).0, 0);
    let inner = door.find("unknown").unwrap();
    assert_eq!(marks(&door), (1, 0));
    shell(door.source.path(), "touch unknown/late");
    let late = Invalidation::Entry { parent: inner.attr.id, name: Box::from(&b"late"[..]) };
    assert!(heard(&door, &receiver, &last).contains(&late));
}

/// Takes no name.
struct Nothing;

impl DirSink for Nothing {
    fn push(&mut self, _: DirEntry<'_>) -> bool {
        false
    }
}

#[test]
fn whoever_asks_meanwhile_keeps_a_host_from_resting() {
    let Some((door, _receiver)) = watched(None) else { return };
    shell(door.source.path(), "echo 1 > file");
    let everything = known(&door);
    assert!(!told(&door, &everything));
    let asked: [&dyn Fn(); 3] =
        [&|| drop(door.find("file").unwrap()), &|| assert!(door.find("missing").is_err()), &|| {
            drop(door.create(&Caller::ROOT, "fresh", 0o600, 0o2).unwrap())
        }];
    for ask in asked {
        assert!(door.host.rest(None));
        ask();
        assert!(!told(&door, &everything));
        assert_eq!(marks(&door), (1, 0));
    }
    // A listing ends idleness, too.
    assert!(rest(&door));
    assert_eq!(marks(&door).0, 0);
    door.host.readdir(&Caller::ROOT, &door.root(), 0, true, &mut Nothing).unwrap();
    assert_eq!(marks(&door), (1, 0));
}

#[test]
fn a_file_that_cannot_be_found_again_keeps_a_host_from_resting() {
    let Some((door, _receiver)) = watched(None) else { return };
    shell(door.source.path(), "echo 1 > file");
    door.find("file").unwrap();
    shell(door.source.path(), "mkdir -p deep; mv file deep/");
    assert!(!rest(&door));
    assert_eq!(marks(&door), (1, 0));
    door.find("deep/file").unwrap();
    assert!(rest(&door));
}

#[test]
fn hosts_of_a_company_rest_and_wake_together() {
    let tree = Arc::new(WatchGroup::default()).tree();
    let Some((one, _one)) = watched(Some(&tree)) else { return };
    let Some((other, hears)) = watched(Some(&tree)) else { return };
    let last = last(&other);
    assert!(rest(&one));
    assert_eq!(marks(&one), (1, 1));
    assert!(rest(&other));
    assert_eq!(marks(&one), (0, 3));
    heard(&other, &hears, &last);
    assert!(one.find("missing").is_err());
    assert_eq!(marks(&one), (1, 0));
    heard(&other, &hears, &last);
    // The other host is awake as well: it must be made idle again.
    assert!(!told(&other, &known(&other)));
    // The marks of a drowsy host are removed with another's failure, so it does not become idle.
    let known_to_other = known(&other);
    assert!(other.host.rest(None) && other.host.rest(Some(&known_to_other)));
    let known_to_one = known(&one);
    assert!(!told(&one, &known_to_one) && marks(&one) == (1, 0));
    assert!(!other.host.rest(Some(&[])));
    assert!(rest(&other) && rest(&one));
    drop(one);
    assert!(other.find("missing").is_err());
    assert_eq!(marks(&other), (1, 0));
    heard(&other, &hears, &last);
}
