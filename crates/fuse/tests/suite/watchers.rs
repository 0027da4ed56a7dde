//! Watchers inside a mount are notified of changes made outside of it.

use crate::fixture::{Mirror, eventually, on_each_transport};
use nacre_stack::spec::HostCoherence;
use rustix::fs::inotify::{CreateFlags, ReadFlags, WatchFlags, add_watch, init};
use std::{cell::RefCell, collections::BTreeSet, fs, mem::MaybeUninit, os::fd::OwnedFd, path::Path, process::Command};

/// The events of a watcher of one directory so far: kind and name.
struct Watcher {
    queue: OwnedFd,
    told: RefCell<BTreeSet<(&'static str, String)>>,
}

impl Watcher {
    fn new(directory: &Path) -> Watcher {
        let queue = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        let events = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MODIFY | WatchFlags::ATTRIB;
        add_watch(&queue, directory, events).unwrap();
        Watcher { queue, told: RefCell::default() }
    }

    fn was_told(&self, kind: &'static str, name: &str) -> bool {
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut reader = rustix::fs::inotify::Reader::new(&self.queue, &mut space);
        while let Ok(event) = reader.next() {
            let name = event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let kinds = [
                (ReadFlags::CREATE, "create"),
                (ReadFlags::DELETE, "delete"),
                (ReadFlags::MODIFY, "modify"),
                (ReadFlags::ATTRIB, "attributes"),
            ];
            for (flag, kind) in kinds {
                if event.events().contains(flag) {
                    self.told.borrow_mut().insert((kind, name.clone()));
                }
            }
        }
        self.told.borrow().contains(&(kind, name.to_owned()))
    }
}

#[test]
fn watchers_inside_are_told_of_changes_behind() {
    on_each_transport(|transport| {
        let fill = |source: &Path| {
            fs::create_dir(source.join("d")).unwrap();
            fs::write(source.join("d/old"), "old").unwrap();
        };
        let mirror = Mirror::new(transport, HostCoherence::Watch, fill, |options| options.notify_watchers = true);
        let elsewhere = |command: &str| {
            let status = Command::new("sh").arg("-c").arg(command).current_dir(mirror.below("d")).status().unwrap();
            assert!(status.success());
        };
        let watcher = Watcher::new(&mirror.path("d"));
        for (command, kind, name) in [
            ("echo new > made", "create", "made"),
            ("mkdir directory", "create", "directory"),
            ("ln -s nowhere link", "create", "link"),
            ("mkfifo fifo", "create", "fifo"),
            ("echo more >> old", "modify", "old"),
            ("chmod 600 old", "attributes", "old"),
            ("mv made moved", "delete", "made"),
            ("rm fifo", "delete", "fifo"),
            ("rmdir directory", "delete", "directory"),
            ("echo x > t && mv t old", "create", "old"),
        ] {
            let known = name == "old" && fs::metadata(mirror.path("d/old")).is_ok();
            assert!(known || name != "old");
            elsewhere(command);
            eventually(command, || watcher.was_told(kind, name));
        }
        assert!(watcher.was_told("create", "moved"));
        // The notifications changed nothing, neither below nor in the visible content.
        let names =
            |path: &Path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>();
        let expected: BTreeSet<_> = ["link", "moved", "old"].into_iter().map(Into::into).collect();
        assert_eq!(names(&mirror.below("d")), expected);
        eventually("the mount shows the same", || names(&mirror.path("d")) == expected);
        for (name, content) in [("old", b"x\n".as_slice()), ("moved", b"new\n")] {
            eventually(name, || fs::read(mirror.path(&format!("d/{name}"))).is_ok_and(|found| found == content));
        }
        for gone in ["made", "fifo", "directory"] {
            eventually("gone", || fs::symlink_metadata(mirror.path(&format!("d/{gone}"))).is_err());
        }
        drop(watcher);
        eventually("nothing of ours keeps the mount busy", || mirror.mount.unmount(false).is_ok());
    });
}
