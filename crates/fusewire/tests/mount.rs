//! Real mounts over both transports. Needs root and /dev/fuse; prints that and passes otherwise.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a failed expectation is what a test reports"
)]

mod support;

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, symlink};
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::channel;
use std::time::Duration;

use fusewire::abi::{init, opcode};
use fusewire::*;
use support::{Mount, getattr, pin, settings, transports};

#[test]
fn names_and_data_arrive_as_they_were_sent() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        symlink("some/target", mount.path("link")).unwrap();
        assert_eq!(std::fs::read_link(mount.path("link")).unwrap().to_str(), Some("some/target"));
        std::fs::create_dir(mount.path("dir")).unwrap();
        let data: Vec<u8> = (0..3_000_001_u32).map(|i| (i * 7 + i / 251) as u8).collect();
        std::fs::write(mount.path("file"), &data).unwrap();
        assert_eq!(std::fs::read(mount.path("file")).unwrap(), data);
        std::fs::rename(mount.path("file"), mount.path("dir/renamed")).unwrap();
        let file = File::open(mount.path("dir/renamed")).unwrap();
        let mut middle = [0; 100];
        file.read_exact_at(&mut middle, 1_000_000).unwrap();
        assert_eq!(middle, data[1_000_000..1_000_100]);
        let value = vec![b'v'; 60_000];
        rustix::fs::fsetxattr(&file, "user.long", &value, rustix::fs::XattrFlags::empty()).unwrap();
        let mut back = vec![0; 65_536];
        assert_eq!(rustix::fs::fgetxattr(&file, "user.long", &mut back).unwrap(), value.len());
        assert_eq!(back[..value.len()], value);
        assert_eq!(rustix::fs::fgetxattr(&file, "user.none", &mut back), Err(rustix::io::Errno::NODATA));
        // 256 KiB at most in one request.
        assert_eq!(mount.session.counters().requests(opcode::WRITE), 12);
        assert_eq!(mount.session.transport() == Transport::Uring, transport == TransportChoice::Uring);
    }
}

#[test]
fn listings_are_whole() {
    let _alone = alone();
    for transport in transports() {
        for flags in [init::DO_READDIRPLUS, 0] {
            let only = Settings { flags, ..settings() };
            let mount = Mount::with(transport, only, &MountOptions::default());
            for i in 0..1500 {
                File::create(mount.path(&format!("{i:04}-{}", "x".repeat(i % 200)))).unwrap();
            }
            let mut names: Vec<_> =
                std::fs::read_dir(mount.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), 1500);
        }
    }
}

#[test]
fn handlers_that_wait_do_not_stall_others() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        for i in 0..12 {
            File::create(mount.path(&format!("gated{i}"))).unwrap();
        }
        File::create(mount.path("free")).unwrap();
        std::thread::scope(|scope| {
            // All on one CPU, so over io_uring all in one queue; one after the other, each waiting before the
            // next comes.
            for i in 0..12 {
                let path = mount.path(&format!("gated{i}"));
                scope.spawn(move || {
                    pin();
                    getattr(&path).unwrap();
                });
                mount.fs.await_waiting(i + 1);
            }
            let path = mount.path("free");
            scope
                .spawn(move || {
                    pin();
                    (0..100).for_each(|_| assert!(getattr(&path).is_ok()));
                })
                .join()
                .unwrap();
            // RELEASEs of the files made above may still be under way.
            while mount.session.in_flight() > 12 {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(mount.session.in_flight(), 12);
            mount.fs.open_gate();
        });
        assert_eq!(mount.session.counters().requests(opcode::GETATTR), 112);
    }
}

/// Sends requests until one thread has answered nearly all of a thousand in a row: it reads alone.
fn ask_until_one_thread_reads(mount: &Mount, name: &str) {
    loop {
        mount.fs.handled.lock().unwrap().clear();
        (0..1000).for_each(|_| _ = mount.getattr(name).unwrap());
        if mount.fs.handled.lock().unwrap().values().any(|requests| *requests > 900) {
            return;
        }
    }
}

#[test]
fn a_thread_that_reads_alone_holds_nobody_up() {
    let _alone = alone();
    if transports().is_empty() {
        return;
    }
    let mount = Mount::new(TransportChoice::Device);
    let path = mount.dir.path().to_str().unwrap().as_bytes().to_vec();
    mount.fs.nodes.lock().unwrap().get_mut(&1).unwrap().data = path;
    for name in ["free", "locked", "gated0", "gated1", "gated2", "gated3"] {
        File::create(mount.path(name)).unwrap();
    }
    let mut file = File::options().read(true).write(true).open(mount.path("free")).unwrap();
    std::thread::scope(|scope| {
        // It waits, inside `blocking` ...
        for waiting in 1..=4 {
            ask_until_one_thread_reads(&mount, "free");
            scope.spawn(|| lock(&File::options().write(true).open(mount.path("locked")).unwrap()).unwrap());
            mount.fs.await_waiting(waiting);
        }
        // ... or outside of it.
        for waiting in 5..=8 {
            ask_until_one_thread_reads(&mount, "free");
            let path = mount.path(&format!("gated{}", waiting - 5));
            scope.spawn(move || getattr(&path).unwrap());
            mount.fs.await_waiting(waiting);
        }
        // It sends a request to its own mount.
        ask_until_one_thread_reads(&mount, "free");
        assert_eq!(std::fs::metadata(mount.path("self")).unwrap_err().raw_os_error(), Some(libc::EDEADLK));
        // Several send requests at once, and data is moved.
        ask_until_one_thread_reads(&mount, "free");
        let crowd = (0..4).map(|_| scope.spawn(|| (0..1000).for_each(|_| _ = mount.getattr("free").unwrap())));
        crowd.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
        ask_until_one_thread_reads(&mount, "free");
        file.write_all(&vec![7; 1 << 20]).unwrap();
        ask_until_one_thread_reads(&mount, "free");
        assert_eq!(std::fs::read(mount.path("free")).unwrap(), vec![7; 1 << 20]);
        mount.fs.open_gate();
        while mount.session.in_flight() > 0 {
            rustix::io::write(&mount.fs.unlock, &1_u64.to_ne_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    // The end of the session has to find it as well.
    ask_until_one_thread_reads(&mount, "free");
    drop(file);
    mount.session.unmount(true).unwrap();
    mount.session.wait();
    assert_eq!(mount.fs.destroyed.load(SeqCst), 1);
}

/// During execve(2) a process closes files, and readers of its `/proc` entries wait for the end of that.
#[test]
fn a_caller_that_becomes_another_program_holds_nobody_up() {
    let _alone = alone();
    if transports().is_empty() {
        return;
    }
    let mount = Mount::new(TransportChoice::Device);
    mount.fs.open_gate();
    File::create(mount.path("free")).unwrap();
    for _ in 0..5 {
        let held = File::create(mount.path("closed")).unwrap();
        *mount.fs.gate.0.lock().unwrap() = false;
        let before = mount.fs.waiting.load(SeqCst);
        std::thread::scope(|scope| {
            ask_until_one_thread_reads(&mount, "free");
            let program = scope.spawn(|| Command::new("true").status().unwrap());
            mount.fs.await_waiting(before + 1);
            ask_until_one_thread_reads(&mount, "free");
            assert!(!program.is_finished());
            mount.fs.open_gate();
            assert!(program.join().unwrap().success());
        });
        drop(held);
    }
}

#[test]
fn a_burst_of_waiting_requests_finds_threads() {
    let _alone = alone();
    for transport in transports() {
        let one = SessionOptions { transport, threads: 1, ..SessionOptions::default() };
        let mount = Mount::with_session(one, settings(), &MountOptions::default());
        for i in 0..12 {
            File::create(mount.path(&format!("gated{i}"))).unwrap();
        }
        std::thread::scope(|scope| {
            let start = std::sync::Arc::new(std::sync::Barrier::new(12));
            for i in 0..12 {
                let (path, start) = (mount.path(&format!("gated{i}")), std::sync::Arc::clone(&start));
                scope.spawn(move || {
                    pin();
                    start.wait();
                    getattr(&path).unwrap();
                });
            }
            // They come while threads are still being created, and no other request could help them on.
            mount.fs.await_waiting(12);
            mount.fs.open_gate();
        });
    }
}

#[test]
fn many_users_may_wait_for_locks() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        File::create(mount.path("file")).unwrap();
        std::thread::scope(|scope| {
            for i in 0..60 {
                let path = mount.path("file");
                scope.spawn(move || {
                    pin();
                    lock(&File::options().write(true).open(path).unwrap()).unwrap();
                });
                mount.fs.await_waiting(i + 1);
            }
            for _ in 0..60 {
                getattr(&mount.path("file")).unwrap();
                rustix::io::write(&mount.fs.unlock, &1_u64.to_ne_bytes()).unwrap();
                // Each write wakes one or more of them; continue when one got it.
                let mut events = [rustix::event::PollFd::new(&mount.fs.unlock, rustix::event::PollFlags::OUT)];
                rustix::event::poll(&mut events, None).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
            // A reader takes the whole count, so some may still wait.
            while mount.session.in_flight() > 0 {
                rustix::io::write(&mount.fs.unlock, &1_u64.to_ne_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(mount.session.threads() > 30);
    }
}

#[test]
fn a_crowd_that_starts_to_wait_at_once_is_served() {
    let _alone = alone();
    const CROWD: u64 = 150;
    for transport in transports() {
        for _ in 0..4 {
            let mount = Mount::new(transport);
            File::create(mount.path("file")).unwrap();
            let start = std::sync::Arc::new(std::sync::Barrier::new(CROWD as usize));
            std::thread::scope(|scope| {
                for _ in 0..CROWD {
                    let (path, start) = (mount.path("file"), std::sync::Arc::clone(&start));
                    scope.spawn(move || {
                        pin();
                        let file = File::options().write(true).open(path).unwrap();
                        start.wait();
                        // While another thread is being created for one of them, the next starts to wait: that
                        // is no reason to refuse it.
                        lock(&file).unwrap();
                    });
                }
                mount.fs.await_waiting(CROWD);
                while mount.session.in_flight() > 0 {
                    rustix::io::write(&mount.fs.unlock, &1_u64.to_ne_bytes()).unwrap();
                    std::thread::yield_now();
                }
            });
        }
    }
}

/// Makes that many requests wait in their handlers, outside of `blocking`; returns their results.
fn hold_up<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    mount: &'scope Mount,
    many: u64,
) -> Vec<std::thread::ScopedJoinHandle<'scope, rustix::io::Result<()>>> {
    let all = 0..many;
    all.map(|i| {
        scope.spawn(move || {
            pin();
            getattr(&mount.path(&format!("gated{i}"))).map(drop)
        })
    })
    .collect()
}

fn mount_with_gated_files(transport: TransportChoice, many: u64) -> Mount {
    let all = MountOptions { allow_other: true, ..MountOptions::default() };
    let mount = Mount::with(transport, settings(), &all);
    for name in (0..many).map(|i| format!("gated{i}")).chain(["other".to_owned()]) {
        File::create(mount.path(&name)).unwrap();
    }
    mount
}

#[test]
fn requests_that_take_long_hold_nobody_up() {
    let _alone = alone();
    const MANY: u64 = 150;
    for transport in transports() {
        let mount = mount_with_gated_files(transport, MANY);
        let root = File::open(mount.dir.path()).unwrap();
        std::thread::scope(|scope| {
            let held = hold_up(scope, &mount, MANY);
            mount.fs.await_waiting(MANY);
            // Also of the same user.
            getattr(&mount.path("other")).unwrap();
            ask_as_other_user(&root);
            mount.fs.open_gate();
            held.into_iter().for_each(|held| held.join().unwrap().unwrap());
        });
        // On the device, surplus threads then end.
        while mount.session.transport() == Transport::Device && mount.session.threads() > 40 {
            std::thread::sleep(Duration::from_millis(1));
        }
        ask_as_other_user(&root);
    }
}

#[test]
fn one_user_does_not_take_all_threads_by_requests_that_take_long() {
    let _alone = alone();
    if transports().is_empty() {
        return;
    }
    // Above the limit of one user, and one round of threads that were created before the limit was noticed.
    const MANY: u64 = 700;
    let mount = mount_with_gated_files(TransportChoice::Device, MANY);
    let root = File::open(mount.dir.path()).unwrap();
    std::thread::scope(|scope| {
        let held = hold_up(scope, &mount, MANY);
        while held.iter().filter(|held| held.is_finished()).count() < 100 {
            std::thread::sleep(Duration::from_millis(1));
        }
        ask_as_other_user(&root);
        mount.fs.open_gate();
        let refused: Vec<_> = held.into_iter().filter_map(|held| held.join().unwrap().err()).collect();
        assert!(refused.iter().all(|error| *error == rustix::io::Errno::AGAIN), "{refused:?}");
    });
    getattr(&mount.path("other")).unwrap();
}

#[test]
fn one_user_does_not_take_all_threads_by_waiting_for_locks() {
    let _alone = alone();
    if transports().is_empty() {
        return;
    }
    let all = MountOptions { allow_other: true, ..MountOptions::default() };
    let mount = Mount::with(TransportChoice::Device, settings(), &all);
    File::create(mount.path("file")).unwrap();
    let file = File::options().write(true).open(mount.path("file")).unwrap();
    std::thread::scope(|scope| {
        let tries: Vec<_> = (0..1100).map(|_| scope.spawn(|| lock(&file))).collect();
        // The others are refused: one user has half of the threads at most.
        while mount.fs.waiting.load(SeqCst) < 1024 || tries.iter().filter(|one| one.is_finished()).count() < 1100 - 1024
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(mount.fs.waiting.load(SeqCst), 1024);
        let other = scope.spawn(|| {
            // SAFETY: takes a number; concerns this thread alone.
            unsafe { libc::setfsuid(1000) };
            lock(&file)
        });
        mount.fs.await_waiting(1025);
        while mount.session.in_flight() > 0 {
            rustix::io::write(&mount.fs.unlock, &1_u64.to_ne_bytes()).unwrap();
            std::thread::yield_now();
        }
        other.join().unwrap().unwrap();
        let refused: Vec<_> = tries.into_iter().filter_map(|one| one.join().unwrap().err()).collect();
        assert!(refused.iter().all(|error| error.raw_os_error() == Some(libc::EAGAIN)) && refused.len() == 1100 - 1024);
    });
}

/// Makes some requests as user 1000.
fn ask_as_other_user(root: &File) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin();
            // SAFETY: takes a number; concerns this thread alone.
            unsafe { libc::setfsuid(1000) };
            for _ in 0..50 {
                let flags = rustix::fs::AtFlags::STATX_FORCE_SYNC;
                rustix::fs::statx(root, "other", flags, rustix::fs::StatxFlags::BASIC_STATS).unwrap();
            }
        });
    });
}

/// Held by every test: one at a time. Some start programs, and a child has a copy of all descriptors of this
/// process until its execve(2). Meanwhile a mount in which another test has just closed a file is busy, a
/// program that has just been copied cannot be run, and closing a file sends a request to a session that may
/// have ended, which waits because of the copy of its device.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// `fcntl(F_SETLKW)` for the whole file.
fn lock(file: &File) -> std::io::Result<()> {
    let lock = libc::flock { l_type: libc::F_WRLCK as i16, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the struct lives for the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLKW, &raw const lock) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn a_signal_interrupts_a_waiting_request() {
    let _alone = alone();
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing; no SA_RESTART, so that the call returns EINTR.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    for transport in transports() {
        let mount = Mount::new(transport);
        let file = File::create(mount.path("file")).unwrap();
        for round in 1..=20 {
            let (sender, receiver) = channel();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    sender.send(rustix::thread::gettid().as_raw_pid()).unwrap();
                    lock(&file)
                });
                let tid = receiver.recv().unwrap();
                mount.fs.await_waiting(round);
                // SAFETY: a signal with a handler, to a thread of this process.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGUSR1) };
                assert_eq!(waiter.join().unwrap().unwrap_err().raw_os_error(), Some(libc::EINTR));
            });
        }
        assert!(mount.session.counters().requests(opcode::INTERRUPT) >= 20);
    }
}

#[test]
fn a_panic_is_an_error_of_one_request() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        for _ in 0..10 {
            let error = std::fs::metadata(mount.path("panic")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
        }
        File::create(mount.path("file")).unwrap();
    }
}

#[test]
fn unmounting_while_busy() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        std::fs::write(mount.path("file"), b"text").unwrap();
        let mut file = File::open(mount.path("file")).unwrap();
        assert_eq!(mount.session.unmount(false).unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
        mount.session.unmount(true).unwrap();
        assert!(!mount.session.is_mounted());
        mount.session.unmount(true).unwrap();
        mount.session.unmount(false).unwrap();
        assert!(!mount.path("file").exists());
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        assert!(!mount.session.ended());
        drop(file);
        mount.session.wait();
        assert!(mount.session.ended());
        assert_eq!(mount.fs.destroyed.load(SeqCst), 1);
        assert_eq!(mount.session.threads(), 0);
    }
}

#[test]
fn somebody_else_may_unmount() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        assert!(Command::new("umount").arg(mount.dir.path()).status().unwrap().success());
        mount.session.wait();
        mount.session.unmount(false).unwrap();
        // Another mount at the same mount point stays.
        let second = Mount::new(transport);
        let cover = fusewire::mount(second.dir.path(), &MountOptions::default()).unwrap();
        assert_eq!(second.session.unmount(false).unwrap_err().kind(), std::io::ErrorKind::ResourceBusy);
        drop(cover);
        second.session.unmount(false).unwrap();
        second.session.wait();
    }
}

#[test]
fn an_abort_frees_everybody() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        let file = File::create(mount.path("file")).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| lock(&file));
            mount.fs.await_waiting(1);
            mount.session.abort();
            let error = waiter.join().unwrap().unwrap_err().raw_os_error();
            assert!(matches!(error, Some(libc::ECONNABORTED | libc::ENOTCONN | libc::EINTR)), "{error:?}");
        });
        mount.session.wait();
        assert!((&file).write(b"x").is_err());
        assert!(mount.session.notifier().inc_epoch().is_err());
        assert_eq!(mount.fs.destroyed.load(SeqCst), 1);
    }
}

#[test]
fn an_abort_behind_a_lazy_unmount_frees_everybody_while_a_handler_waits() {
    let _alone = alone();
    if transports().is_empty() {
        return;
    }
    let mount = Mount::new(TransportChoice::Device);
    let gated = File::create(mount.path("gated")).unwrap();
    let other = File::create(mount.path("other")).unwrap();
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let flags = rustix::fs::AtFlags::EMPTY_PATH | rustix::fs::AtFlags::STATX_FORCE_SYNC;
            tell.send(rustix::fs::statx(&gated, c"", flags, rustix::fs::StatxFlags::BASIC_STATS)).unwrap();
        });
        mount.fs.await_waiting(1);
        mount.session.unmount(true).unwrap();
        mount.session.abort();
        // The handler still waits for the gate, as one that waits for another request would.
        let answered = told.recv_timeout(Duration::from_secs(60));
        let ended = matches!(answered, Ok(Err(_))).then(|| (&other).write(b"x"));
        mount.fs.open_gate();
        assert!(ended.is_some_and(|written| written.is_err()), "{answered:?}");
    });
    mount.session.wait();
    assert_eq!(mount.fs.destroyed.load(SeqCst), 1);
}

#[test]
fn an_abort_leaves_what_is_mounted_on_top() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("cover", mount.dir.path(), "tmpfs", flags, None).unwrap();
        std::fs::write(mount.path("kept"), "x").unwrap();
        mount.session.abort();
        mount.session.wait();
        assert_eq!(mount.fs.destroyed.load(SeqCst), 1);
        assert!(mount.path("kept").exists());
        unmount_path(mount.dir.path(), false).unwrap();
        assert!(mount.session.is_mounted());
        mount.session.unmount(false).unwrap();
    }
}

#[test]
fn dropping_a_session_in_use_ends_it() {
    let _alone = alone();
    for transport in transports() {
        let Mount { fs, session, dir } = Mount::new(transport);
        let file = File::create(dir.path().join("file")).unwrap();
        let notifier = session.notifier();
        drop(session);
        assert_eq!(fs.destroyed.load(SeqCst), 1);
        assert!(getattr(dir.path()).is_ok(), "the directory below is there again");
        // The connection is closed although a notifier and an open file remain.
        while (&file).write(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(notifier.inc_epoch().is_err());
    }
}

#[test]
fn a_killed_daemon_leaves_a_mount_that_can_be_removed() {
    let _alone = alone();
    for transport in transports() {
        let dir = tempfile::tempdir().unwrap();
        let word = if transport == TransportChoice::Uring { "uring" } else { "device" };
        let mut child =
            Command::new(example()).arg(dir.path()).arg(word).stdout(std::process::Stdio::null()).spawn().unwrap();
        while !dir.path().join("hello.txt").exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(std::fs::read(dir.path().join("hello.txt")).unwrap(), b"Hello, world!\n");
        child.kill().unwrap();
        child.wait().unwrap();
        while !getattr(dir.path()).is_err_and(|error| error == rustix::io::Errno::NOTCONN) {
            std::thread::sleep(Duration::from_millis(5));
        }
        unmount_path(dir.path(), false).unwrap();
    }
}

#[test]
fn notifications_make_the_kernel_ask_again() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        File::create(mount.path("file")).unwrap();
        let counters = mount.session.counters();
        let notifier = mount.session.notifier();
        let lookups = |name: &str| {
            let before = counters.requests(opcode::LOOKUP);
            let _ = std::fs::metadata(mount.path(name));
            counters.requests(opcode::LOOKUP) - before
        };
        lookups("file");
        lookups("absent");
        assert_eq!((lookups("file"), lookups("absent")), (0, 0));
        notifier.inval_entry(1, b"file", false).unwrap();
        notifier.inval_entry(1, b"absent", false).unwrap();
        assert_eq!((lookups("file"), lookups("absent")), (1, 1));
        let offer = mount.session.offer();
        if offer.has(init::HAS_EXPIRE_ONLY) {
            notifier.inval_entry(1, b"file", true).unwrap();
            assert_eq!((lookups("file"), lookups("file")), (1, 0));
        }
        if offer.minor >= 43 {
            notifier.inc_epoch().unwrap();
            assert_eq!((lookups("file"), lookups("file")), (1, 0));
        }
        let before = counters.requests(opcode::GETATTR);
        notifier.inval_inode(2, -1, 0).unwrap();
        std::fs::metadata(mount.path("file")).unwrap();
        assert_eq!(counters.requests(opcode::GETATTR), before + 1);
        notifier.delete(1, 2, b"file").unwrap();
        assert_eq!(lookups("file"), 1);
        assert_eq!(notifier.inval_inode(99, 0, 0).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        if offer.minor >= 45 {
            let before = mount.fs.forgotten.load(SeqCst);
            notifier.prune(&[2, 77]).unwrap();
            while mount.fs.forgotten.load(SeqCst) == before {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn passthrough_sends_no_data_requests() {
    let _alone = alone();
    for transport in transports() {
        let flags = settings().flags | init::PASSTHROUGH;
        let mount =
            Mount::with(transport, Settings { flags, max_stack_depth: 1, ..settings() }, &MountOptions::default());
        let lower = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = File::options().read(true).write(true).open(lower.path()).unwrap();
        let backing = mount.session.backing();
        match backing.probe(file.as_fd()) {
            Passthrough::Permitted => {}
            other => {
                eprintln!("skipped: passthrough is not permitted here: {other:?}");
                continue;
            }
        }
        mount.fs.backing.set((backing, file.into())).ok().unwrap();
        std::fs::write(mount.path("file"), b"through").unwrap();
        assert_eq!(std::fs::read(lower.path()).unwrap(), b"through");
        let counters = mount.session.counters();
        assert_eq!((counters.requests(opcode::WRITE), counters.requests(opcode::READ)), (0, 0));
    }
}

#[test]
fn without_the_flag_nothing_can_be_registered() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        let file = tempfile::tempfile().unwrap();
        assert_eq!(mount.session.backing().probe(file.as_fd()), Passthrough::NotNegotiated);
    }
}

#[test]
fn a_moment_is_reached_when_the_requests_are_answered() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        File::create(mount.path("gated")).unwrap();
        File::create(mount.path("free")).unwrap();
        mount.session.quiescent_after().wait();
        std::thread::scope(|scope| {
            scope.spawn(|| mount.getattr("gated").unwrap());
            mount.fs.await_waiting(1);
            let mut moment = mount.session.quiescent_after();
            for _ in 0..100 {
                mount.getattr("free").unwrap();
                assert!(!moment.reached());
            }
            mount.fs.open_gate();
            moment.wait();
        });
        mount.session.quiescent_after().wait();
        // Waiting for a lock blocks no other request.
        let file = File::create(mount.path("file")).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| lock(&file).unwrap());
            mount.fs.await_waiting(2);
            mount.session.quiescent_after().wait();
            rustix::io::write(&mount.fs.unlock, &1_u64.to_ne_bytes()).unwrap();
        });
    }
}

#[test]
fn replies_are_in_the_kernel_when_a_moment_is_reached() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        File::create(mount.path("file")).unwrap();
        std::thread::scope(|scope| {
            let users: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..5000).for_each(|_| assert!(mount.getattr("file").is_ok()))))
                .collect();
            let mut moments = 0;
            while !users.iter().all(|user| user.is_finished()) {
                mount.session.quiescent_after().wait();
                moments += 1;
            }
            assert!(moments > 0);
        });
        mount.session.quiescent_after().wait();
        assert_eq!(mount.session.in_flight(), 0);
        assert_eq!(mount.session.counters().requests(opcode::GETATTR), 20_000);
    }
}

#[test]
fn requests_of_our_own_threads_are_known() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        let path = mount.dir.path().to_str().unwrap().as_bytes().to_vec();
        mount.fs.nodes.lock().unwrap().get_mut(&1).unwrap().data = path;
        assert_eq!(std::fs::metadata(mount.path("self")).unwrap_err().raw_os_error(), Some(libc::EDEADLK));
        assert_eq!(mount.fs.own_requests.load(SeqCst), 1);
        assert!(mount.fs.workers.load(SeqCst) >= 2);
    }
}

#[test]
fn mounts_on_files_and_with_odd_names() {
    let _alone = alone();
    for transport in transports() {
        for method in [Method::Direct, Method::Fusermount] {
            let dir = tempfile::tempdir().unwrap();
            let place = dir.path().join("odd \\ na,me");
            std::fs::create_dir(&place).unwrap();
            let options = MountOptions {
                fsname: OsString::from("odd, \\ name"),
                subtype: "odd".to_owned(),
                flags: libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOATIME,
                allow_other: true,
                method,
                ..MountOptions::default()
            };
            let device = mount(&place, &options).unwrap();
            let fs = support::TestFs::new(settings());
            let session =
                Session::start(device, fs, SessionOptions { transport, ..SessionOptions::default() }).unwrap();
            let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            let line = table.lines().find(|line| line.contains(dir.path().to_str().unwrap())).unwrap();
            assert!(line.ends_with("user_id=0,group_id=0,allow_other"), "{line}");
            assert!(line.contains("fuse.odd odd,\\040\\134\\040name"), "{line}");
            assert!(line.contains("nosuid") && line.contains("noatime"), "{line}");
            session.unmount(false).unwrap();
            session.wait();
        }
        // A regular file as mountpoint: the root is a regular file.
        let target = tempfile::NamedTempFile::new().unwrap();
        let device = mount(target.path(), &MountOptions::default()).unwrap();
        let fs = support::TestFs::new(settings());
        fs.nodes.lock().unwrap().get_mut(&1).unwrap().attr.mode = 0o100_644;
        let session = Session::start(device, fs, SessionOptions { transport, ..SessionOptions::default() }).unwrap();
        std::fs::write(target.path(), b"over the file").unwrap();
        assert_eq!(std::fs::read(target.path()).unwrap(), b"over the file");
        session.unmount(false).unwrap();
        session.wait();
        assert_eq!(std::fs::read(target.path()).unwrap(), b"");
    }
}

#[test]
fn what_fusermount_says_is_in_the_error() {
    let _alone = alone();
    if transports().is_empty() {
        return;
    }
    let options =
        MountOptions { method: Method::Fusermount, extra: vec!["no-such-option".into()], ..MountOptions::default() };
    let dir = tempfile::tempdir().unwrap();
    let error = mount(dir.path(), &options).unwrap_err().to_string();
    assert!(error.contains("no-such-option") || error.contains("Invalid argument"), "{error}");
    let options = MountOptions { flags: 256, ..options };
    assert_eq!(mount(dir.path(), &options).unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    let options = MountOptions { flags: 0, extra: vec!["ro,auto_unmount".into()], ..options };
    assert_eq!(mount(dir.path(), &options).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    let options = MountOptions { extra: Vec::new(), fusermount: Some("/nonexistent/fusermount3".into()), ..options };
    let error = mount(dir.path(), &options).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/fusermount3"), "{error}");
}

#[test]
fn many_threads_at_once() {
    let _alone = alone();
    for transport in transports() {
        let mount = Mount::new(transport);
        std::thread::scope(|scope| {
            for user in 0..8 {
                let mount = &mount;
                scope.spawn(move || {
                    for i in 0..300 {
                        let path = mount.path(&format!("{user}-{i}"));
                        std::fs::write(&path, path.to_str().unwrap()).unwrap();
                        assert_eq!(std::fs::read_to_string(&path).unwrap(), path.to_str().unwrap());
                        std::fs::remove_file(&path).unwrap();
                    }
                });
            }
        });
        let counters = mount.session.counters();
        assert_eq!((counters.requests(opcode::CREATE), counters.requests(opcode::UNLINK)), (2400, 2400));
    }
}

/// The example, as nobody, over `fusermount3`.
#[test]
fn an_ordinary_user_can_mount() {
    let _alone = alone();
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65_534;
    // Some starters of daemons ignore SIGCHLD, which is inherited: then there is no exit status.
    let starts = ["--default-signal=CHLD", "--ignore-signal=CHLD"];
    for (transport, start) in transports().into_iter().flat_map(|transport| starts.map(|start| (transport, start))) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let (program, place) = (dir.path().join("hello"), dir.path().join("mnt"));
        std::fs::copy(example(), &program).unwrap();
        std::fs::create_dir(&place).unwrap();
        chown(&place, Some(NOBODY), Some(NOBODY)).unwrap();
        let as_nobody = |program: &std::path::Path| {
            let mut command = Command::new(program);
            command.uid(NOBODY).gid(NOBODY).current_dir(dir.path());
            command
        };
        let word = if transport == TransportChoice::Uring { "uring" } else { "device" };
        let mut command = as_nobody("env".as_ref());
        command.arg(start).arg(&program).arg("mnt").arg(word);
        let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        let text = loop {
            // Root may not access the mount of another user.
            let output = as_nobody("cat".as_ref()).arg("mnt/hello.txt").output().unwrap();
            if output.status.success() || child.try_wait().unwrap().is_some() {
                break output.stdout;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(text, b"Hello, world!\n");
        assert!(as_nobody("fusermount3".as_ref()).args(["-u", "mnt"]).status().unwrap().success());
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn without_descriptors_for_rings_the_device_serves() {
    let _alone = alone();
    if !transports().contains(&TransportChoice::Uring) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = "ulimit -n 8 && exec \"$0\" \"$1\" auto";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(example()).arg(dir.path()).stdout(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    while !dir.path().join("hello.txt").exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    unmount_path(dir.path(), false).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("serving over Device: cannot make an io_uring ring"), "{said}");
}

/// The program of `examples/hello.rs`, which cargo builds with the tests.
fn example() -> std::path::PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("examples/hello")
}
