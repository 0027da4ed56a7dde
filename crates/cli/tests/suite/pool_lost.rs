//! A pool whose process is gone is unhealthy until it is imported again, and a stuck pool does not
//! hide the others.

use crate::mounting::{as_root, eventually, is_mounted, kill, needs, pools::Pool, text};
use rustix::process::Signal;
use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

fn lost(short: &str) -> Pool {
    let pool = Pool::made(short, "256M", &[]);
    pool.told(&["fs", "create", "%/a"]);
    pool.told(&["fs", "create", "%/a/b"]);
    pool
}

impl Pool {
    /// Returns the output of a command, whatever its exit code: other pools on this machine may be in any
    /// state.
    fn shown(&self, words: &[&str]) -> String {
        text(&self.run(words).stdout)
    }

    fn health(&self) -> String {
        self.shown(&["pool", "list", "-H", "-o", "health", "%"]).trim().to_owned()
    }

    fn lose(&self) {
        self.die();
        eventually("the end of the process is noticed", || self.health() == "UNAVAIL");
    }
}

#[test]
fn a_pool_without_its_process_is_told_until_it_is_imported_again() {
    needs!(as_root());
    let pool = lost("gone");
    let file = pool.at("a/b/file");
    fs::write(&file, "kept").unwrap();
    pool.nacre(&["pool", "sync", "%"]);
    let up = |up: &str| format!("nacre_pool_up{{pool=\"{}\"}} {up}\n", pool.name);
    assert!(pool.nacre(&["metrics"]).contains(&up("1")));
    pool.lose();
    // All that show pools show it.
    let ill = pool.shown(&["pool", "status", "-x"]);
    for said in [format!("  pool: {}\n state: UNAVAIL\n", pool.name), format!("nacre pool import {}", pool.name)] {
        assert!(ill.contains(&said), "{ill}");
    }
    assert!(
        pool.shown(&["pool", "list", "-H", "-o", "name,size,health"]).contains(&format!("{}\t-\tUNAVAIL\n", pool.name))
    );
    for words in [&["pool", "status", "--json"][..], &["pool", "list", "--json"], &["pool", "status", "--json", "%"]] {
        let told: serde_json::Value = serde_json::from_str(&pool.shown(words)).unwrap();
        assert_eq!(told["pools"][&pool.name]["state"], "UNAVAIL", "{words:?}: {told}");
    }
    assert!(pool.nacre(&["metrics"]).contains(&up("0")));
    assert!(text(&pool.run(&["status"]).stderr).contains(&format!("nacre pool import {}", pool.name)));
    // What needs it says why it cannot.
    for words in [
        &["pool", "scrub", "%"][..],
        &["pool", "set", "comment=x", "%"],
        &["pool", "export", "%"],
        &["fs", "list", "%"],
        &["fs", "create", "%/x"],
        &["fs", "set", "quota=1G", "%/a"],
    ] {
        let (code, said) = pool.refused(words);
        assert!(
            code == 1 && said.contains("pool is unavailable") && said.contains("pool import"),
            "{words:?}: {code} {said}"
        );
    }
    // A command for all pools gets the others, and reports this one.
    let other = lost("kept");
    for words in [&["fs", "list"][..], &["fs", "get", "used"], &["pool", "list"], &["pool", "status"]] {
        let output = pool.run(words);
        let (shown, said) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && shown.contains(&other.name), "{words:?}: {shown}{said}");
        let told = said.contains(&format!("cannot open '{}': pool is unavailable", pool.name));
        assert!(told || words[0] == "pool" && shown.contains("UNAVAIL"), "{words:?}: {shown}{said}");
    }
    // Import by name brings it back, over the mounts that were left.
    pool.nacre(&["pool", "import", "%"]);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    assert_eq!(pool.health(), "ONLINE");
    // So does an import under another name, and the old one is expected no more.
    pool.lose();
    let other = pool.called(format!("{}other", pool.name));
    pool.nacre(&["pool", "import", "%", &other]);
    assert!(pool.refused(&["pool", "status", "%"]).1.contains("no such pool"));
    pool.nacre(&["pool", "export", &other]);
    let (code, said) = pool.refused(&["pool", "status", &other]);
    assert!(code == 3 && said.contains("no such pool"), "what was exported is not missed: {said}");
    pool.nacre(&["pool", "import", &other, "%"]);
    // An end in order is an export.
    kill(pool.process(&pool.name), Signal::TERM);
    eventually("the pool is exported", || pool.run(&["pool", "status", "%"]).status.code() == Some(3));
    // While its process ends, it is expected.
    eventually("the metrics forget it", || !pool.nacre(&["metrics"]).contains(&pool.name));
    // A pool that is not wanted back is forgotten.
    pool.nacre(&["pool", "import", "%"]);
    pool.lose();
    pool.nacre(&["pool", "export", "-f", "%"]);
    assert!(pool.refused(&["pool", "list", "%"]).1.contains("no such pool"));
}

/// A process that is killed closes its socket before it frees its name.
#[test]
fn a_process_that_is_just_ending_is_waited_for() {
    needs!(as_root());
    let pool = lost("ending");
    pool.lose();
    let name = fs::File::open(format!("/run/nacre/{}.lock", pool.name)).unwrap();
    name.lock().unwrap();
    let mut command = pool.command("nacre");
    command.args(["pool", "list", "-H", "-o", "health", &pool.name]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut asking = command.spawn().unwrap();
    let wchan = format!("/proc/{}/wchan", asking.id());
    eventually("the command waits, or ends", || {
        asking.try_wait().unwrap().is_some() || fs::read_to_string(&wchan).is_ok_and(|at| at.contains("nanosleep"))
    });
    drop(name);
    assert_eq!(text(&asking.wait_with_output().unwrap().stdout), "UNAVAIL\n");
    pool.nacre(&["pool", "import", "%"]);
}

#[test]
fn a_pool_of_another_boot_is_not_expected() {
    needs!(as_root());
    let pool = lost("boot");
    pool.lose();
    // As where sockets are is kept over a reboot.
    let record = PathBuf::from(format!("/run/nacre/{}.imported", pool.name));
    let mut told: serde_json::Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    told["boot"] = "another".into();
    fs::write(&record, told.to_string()).unwrap();
    assert!(pool.refused(&["pool", "status", "%"]).1.contains("no such pool"));
    pool.nacre(&["pool", "import", "%"]);
    assert_eq!(pool.health(), "ONLINE");
    assert!(is_mounted(&pool.at("")));
}

#[test]
fn a_pool_that_is_stuck_hides_no_others() {
    needs!(as_root());
    let (stuck, other) = (lost("stuck"), lost("beside"));
    let process = stuck.process(&stuck.name);
    kill(process, Signal::STOP);
    // Side by side: each waits for as long as an answer may take.
    let asked = [
        &["pool", "list"][..],
        &["pool", "status"],
        &["pool", "get", "health"],
        &["fs", "list"],
        &["fs", "get", "used"],
    ];
    std::thread::scope(|scope| {
        for words in asked {
            let (stuck, other) = (&stuck, &other);
            scope.spawn(move || {
                let (code, said) = stuck.refused(words);
                assert!(
                    code == 1 && said.contains(&format!("pool '{}' does not answer", stuck.name)),
                    "{words:?}: {said}"
                );
                assert!(said.contains(&format!("{} ", other.name)), "{words:?}: {said}");
            });
        }
        scope.spawn(|| assert!(!stuck.refused(&["pool", "status", "-x"]).1.contains("healthy")));
    });
    kill(process, Signal::CONT);
    assert_eq!(stuck.health(), "ONLINE");
}
