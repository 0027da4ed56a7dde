//! A process that changes real files and keeps their accounts is killed at random moments; its
//! successor must find the usage on disk.

use super::*;
use std::{
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
    sync::atomic::AtomicU32,
    time::Duration,
};

/// Variable that passes the directory to the process that is to be killed.
const DIRECTORY: &str = "CAGE_STATE_TEST_DIRECTORY";
const KILLS: usize = 25;

fn files(directory: &Path) -> PathBuf {
    directory.join("files")
}

fn present(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |file| file.len())
}

fn used(directory: &Path) -> u64 {
    fs::read_dir(files(directory)).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

/// The greatest number of a log.
fn newest_log(state: &Path) -> u64 {
    let names = fs::read_dir(state).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_prefix("log.").and_then(|number| number.parse().ok())).max().unwrap_or(0)
}

fn whole(bytes: u64) -> Sums {
    Sums { whole: Sum { bytes, inodes: 0 }, ..Sums::default() }
}

/// The sum that a start computes.
fn recovered(directory: &Path, start: Start) -> u64 {
    let Start::Crashed { sums, touched, exact: true } = start else { panic!("{start:?}") };
    touched.into_iter().fold(sums.whole.bytes, |sum, touched| {
        let path = files(directory).join(String::from_utf8(touched.place).unwrap());
        sum - touched.charge + present(&path)
    })
}

#[test]
#[ignore = "the process that `a_killed_process_leaves_the_right_accounts` kills"]
fn changes_until_it_is_killed() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).unwrap());
    let (saved, start) = Saved::open(&directory.join("state"), &identity()).unwrap();
    let total = AtomicU64::new(recovered(&directory, start));
    let seed = AtomicU32::new(std::process::id());
    // Recording and booking is one step for a checkpoint.
    let books = RwLock::new(());
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (saved, directory, total, books, seed) = (&saved, &directory, &total, &books, &seed);
            scope.spawn(move || {
                let (mut touched, mut generation) = (std::collections::HashSet::new(), 0);
                loop {
                    let random = seed.fetch_add(0x9e37_79b9, Ordering::Relaxed).wrapping_mul(0x85eb_ca6b) >> 8;
                    let name = format!("{thread}-{}", random % 40);
                    let path = files(directory).join(&name);
                    let was = present(&path);
                    let is = if random % 7 == 0 { 0 } else { u64::from(random % 9973) };
                    {
                        let _together = books.read();
                        if generation != saved.generation() {
                            generation = saved.generation();
                            touched.clear();
                        }
                        if touched.insert(name.clone()) {
                            saved.touch(
                                id(thread << 32 | u64::from(random % 40)),
                                name.as_bytes(),
                                was,
                                owner(0, None),
                            );
                        }
                        total.fetch_add(is.wrapping_sub(was), Ordering::Relaxed);
                        // Under the lock: else a checkpoint would have to record this file as
                        // uncorrected.
                        if is == 0 {
                            let _ = fs::remove_file(&path);
                        } else {
                            fs::OpenOptions::new()
                                .write(true)
                                .create(true)
                                .truncate(false)
                                .open(&path)
                                .unwrap()
                                .set_len(is)
                                .unwrap();
                        }
                    }
                }
            });
        }
        loop {
            let pending = {
                let _alone = books.write();
                saved.begin_checkpoint(&whole(total.load(Ordering::Relaxed)), true).unwrap()
            };
            pending.commit().unwrap();
        }
    });
}

#[test]
fn a_killed_process_leaves_the_right_accounts() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    fs::create_dir(files(path)).unwrap();
    let (saved, start) = Saved::open(&path.join("state"), &identity()).unwrap();
    assert_eq!(start, Start::New);
    saved.checkpoint(&whole(0), true).unwrap();
    drop(saved);
    let test = format!("{}::changes_until_it_is_killed", module_path!().split_once("::").unwrap().1);
    let mut generations = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", &test])
            .env(DIRECTORY, path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while newest_log(&path.join("state")) < generations + 3 {
            assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        // A different moment each time.
        std::thread::sleep(Duration::from_micros(kill as u64 * 1777 % 20_000));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "it ended by itself");
        let (saved, start) = Saved::open(&path.join("state"), &identity()).unwrap();
        generations = saved.generation();
        assert_eq!(recovered(path, start), used(path), "kill {kill}");
    }
    assert!(used(path) > 0, "nothing happened");
}
