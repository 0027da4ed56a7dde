//! Pools in object stores, through the real program: in a bucket of a server of S3 that is killed,
//! busy, loses replies and forgets conditions, by processes that are killed and machines that take
//! the pool from each other; and in a directory, which needs no server.

mod others;
mod readers;
mod safety;
mod surviving;

use crate::mounting::{as_root, eventually, finish, nacre, needs, pools::Yard, sh, text};
use crate::s3_server::{BUCKET, Moto, Weather};
use rustix::process::Signal;
use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
};

/// The secret that no output, log, argument or file may show.
const SECRET: &str = "nobody-reads-this-secret";

/// A pool in a bucket, mounted.
struct InBucket {
    moto: Moto,
    yard: Yard,
    name: String,
    at: PathBuf,
    address: String,
}

impl InBucket {
    /// A server, and no pool yet.
    fn empty() -> InBucket {
        let (moto, yard) = (Moto::start(), Yard::new());
        let (name, at) = (yard.name("ob"), yard.path("at"));
        let keys = format!("[test]\naws_access_key_id = key\naws_secret_access_key = {SECRET}\n");
        fs::write(yard.path("keys"), keys).unwrap();
        InBucket { moto, yard, name, at, address: format!("s3://{BUCKET}/one/tank") }
    }

    fn made(more: &[&str]) -> InBucket {
        let there = InBucket::empty();
        there.create(more);
        there
    }

    /// The words that lead there.
    fn way(&self) -> [&str; 6] {
        ["--endpoint", &self.moto.endpoint, "--profile", "test", "--credentials-file", "keys"]
    }

    fn create(&self, more: &[&str]) {
        let words = ["pool", "create", "-m", self.at.to_str().unwrap()];
        self.yard.nacre(&[&words[..], more, &self.way(), &[&self.name, &self.address]].concat());
    }

    fn killed(&self) {
        self.yard.end(&self.name, Signal::KILL);
    }

    fn import(&self) {
        self.yard.nacre(&["pool", "import", &self.name]);
    }

    fn status(&self) -> String {
        self.yard.nacre(&["pool", "status", &self.name])
    }

    fn sh(&self, script: &str) -> String {
        sh(self.yard.place.path(), script)
    }
}

/// A tree of its own: many small files, and one that is several segments long.
const TREE: &str = "mkdir -p at/tree && cd at/tree && for i in $(seq 300); do mkdir -p d$((i % 7)); echo $i-$i > d$((i % 7))/f$i; done; head -c 20000000 /dev/urandom > large; cd .. && find tree -type f -exec sha256sum {} + | sort > ../sums";

#[test]
fn a_tree_in_a_bucket_survives() {
    needs!(as_root());
    let pool = InBucket::made(&["-O", "compression=zstd"]);
    pool.sh(TREE);
    let sums = || pool.sh("cd at && sha256sum --quiet -c ../sums");
    pool.sh("sync at/tree/large");
    sums();
    // Killed: what was synced is there, and what comes next as well.
    pool.sh("echo synced > at/synced; sync at/synced");
    pool.killed();
    pool.import();
    assert_eq!(pool.sh("cat at/synced"), "synced\n");
    pool.sh("sync -f at; cd at && sha256sum --quiet -c ../sums");
    // Snapshots, a clone, back again.
    let name = &pool.name;
    let nacre = |words: &[&str]| pool.yard.nacre(words);
    nacre(&["fs", "snapshot", "%@a"]);
    pool.sh("rm -r at/tree; echo other > at/synced");
    nacre(&["fs", "clone", "%@a", "%/again"]);
    pool.sh("cd at/again && sha256sum --quiet -c ../../sums");
    nacre(&["fs", "destroy", "%/again"]);
    nacre(&["fs", "rollback", "%@a"]);
    sums();
    // To a pool on a file, and back into the bucket.
    let (disk, there) = (pool.yard.name("disk"), pool.yard.path("disk"));
    nacre(&["pool", "create", "--size", "256M", "-m", there.to_str().unwrap(), &disk, "disk.img"]);
    pool.sh(&format!(
        "{0} fs send {name}@a | NACRE_STATE_DIR=state {0} fs receive {disk}/of; {0} fs send {disk}/of@a | {0} fs receive {name}/back",
        nacre_words()
    ));
    pool.sh(&format!("cd {}/of && sha256sum --quiet -c ../../sums", there.display()));
    pool.sh("cd at/back && sha256sum --quiet -c ../../sums");
    nacre(&["pool", "scrub", "-w", "%"]);
    assert!(pool.status().contains(" with 0 errors on "), "{}", pool.status());
    assert!(nacre(&["pool", "check", "%"]).starts_with("no problems: "));
    // The status reports the requests to the store.
    let json: serde_json::Value = serde_json::from_str(&nacre(&["pool", "status", "--json", "%"])).unwrap();
    let asked = &json["pools"][name]["vdevs"][name]["vdevs"]["s3://pools/one/tank"];
    assert_eq!(asked["vdev_type"], "bucket");
    assert!(
        asked["requests"]["puts"].as_u64().unwrap() > 5 && asked["requests"]["sent"].as_u64().unwrap() > 20_000_000,
        "{asked}"
    );
    assert!(pool.status().contains(" store: "));
    let (_, said) = pool.yard.refused(&["pool", "set", "prices=put=much", "%"]);
    assert!(said.contains("'much' is no price"), "{said}");
    nacre(&["pool", "set", "prices=stored=1000,put=0,get=0,list=0,delete=0,received=0", "%"]);
    let status = pool.status();
    let cost = status.lines().find_map(|line| line.strip_prefix("  cost: ")).unwrap();
    assert!(cost.contains(" there, 0.00 for requests as since the import") && !cost.starts_with("0.00"), "{cost}");
    // Away and back, under another name, from the address alone.
    nacre(&["pool", "export", "%"]);
    let other = pool.yard.name("other");
    let import = ["pool", "import", pool.address.as_str(), &other];
    nacre(&[&import[..], &pool.way()].concat());
    pool.sh("sync -f at; cd at && sha256sum --quiet -c ../sums");
    nacre(&["pool", "export", &other]);
    nacre(&["pool", "import", &other]);
    // Nothing of the secret is anywhere.
    let shown = pool.sh("cat state/pools/*; cat /run/nacre/*.imported /run/nacre/*.log; true");
    let process = pool.yard.process(&other);
    let arguments = text(&fs::read(format!("/proc/{process}/cmdline")).unwrap());
    let history = nacre(&["pool", "history", "-il", &other]);
    let heads = pool.moto.heads().concat();
    for said in [&shown, &arguments, &history, &nacre(&["pool", "status", "--json", &other]), &heads] {
        assert!(!said.contains(SECRET));
    }
    assert!(shown.contains("credentials-file=") && heads.contains("key/"), "what is looked through has what it should");
    nacre(&["pool", "destroy", &other]);
    assert_eq!(pool.moto.keys("one/"), Vec::<String>::new());
}

/// The program, for a shell.
fn nacre_words() -> String {
    format!("env NACRE_STATE_DIR=state {}", nacre().display())
}

#[test]
fn a_store_that_is_away_busy_or_silent_is_waited_for() {
    needs!(as_root());
    let pool = InBucket::made(&["-o", "log=remote"]);
    // Busy, and replies are lost: no error reaches users.
    pool.moto.weather(Weather::Foul);
    pool.sh(TREE);
    for round in 0..5 {
        pool.sh(&format!("echo {round} > at/r{round}; sync at/r{round}"));
    }
    pool.yard.nacre(&["pool", "sync", "%"]);
    assert!(pool.moto.harmed() > 5, "{}", pool.moto.harmed());
    assert!(pool.status().contains(" of them once more;"), "{}", pool.status());
    pool.killed();
    pool.import();
    pool.sh("cat at/r0 at/r4; cd at && sha256sum --quiet -c ../sums");
    pool.moto.weather(Weather::Fair);
    // Idle: no request.
    pool.sh("sync -f at");
    eventually("rest", || {
        let before = pool.moto.requests();
        thread::sleep(std::time::Duration::from_secs(6));
        pool.moto.requests() == before
    });
    // The store is unreachable: a sync waits, and continues when the store is reachable.
    pool.moto.weather(Weather::Closed);
    let at = pool.at.clone();
    let waiting = thread::spawn(move || sh(&at, "echo late > late; sync late"));
    // The status reports it before the pool is given up.
    eventually("silence", || pool.status().contains("no answer for "));
    let status = pool.status();
    assert!(status.contains("state: ONLINE") || status.contains("everybody waits"), "{status}");
    eventually("somebody who waits", || pool.status().contains("everybody waits until it can be made"));
    assert!(!waiting.is_finished());
    pool.moto.weather(Weather::Fair);
    waiting.join().unwrap();
    assert!(pool.status().contains("state: ONLINE"), "{}", pool.status());
    pool.killed();
    pool.import();
    assert_eq!(pool.sh("cat at/late"), "late\n");
    assert!(!pool.status().contains("no answer for "), "{}", pool.status());
    // The bucket is out of space: that is reported at once, and waited for.
    pool.moto.weather(Weather::Full);
    let at = pool.at.clone();
    let waiting = thread::spawn(move || sh(&at, "echo more > more; sync more"));
    eventually("no room", || pool.status().contains("the store has no room left (507 XMinioStorageFull)"));
    assert!(!waiting.is_finished());
    pool.moto.weather(Weather::Fair);
    waiting.join().unwrap();
    assert_eq!(pool.sh("cat at/more"), "more\n");
    // Exported by force while the store is unreachable: the pool is as it was at its last commit.
    pool.yard.nacre(&["pool", "sync", "%"]);
    pool.moto.weather(Weather::Closed);
    pool.sh("echo unsynced > at/unsynced");
    pool.yard.nacre(&["pool", "export", "-f", "%"]);
    pool.moto.weather(Weather::Fair);
    pool.import();
    assert_eq!(pool.sh("test ! -e at/unsynced; cat at/late"), "late\n");
    // A store that says nothing is not waited for where another pool is wanted.
    pool.yard.nacre(&["pool", "export", "%"]);
    pool.moto.weather(Weather::Closed);
    let (near, bucket) = (pool.yard.name("near"), pool.yard.path("bucket"));
    fs::create_dir(&bucket).unwrap();
    pool.yard.nacre(&["pool", "create", "-m", "none", &near, &format!("file://{}", bucket.display())]);
    pool.yard.nacre(&["pool", "export", &near]);
    let said = pool.yard.told(&["pool", "import", &near]);
    assert!(said.contains("s3://pools/one/tank: the store does not answer: passed over"), "{said}");
    pool.yard.nacre(&["pool", "destroy", &near]);
    pool.moto.weather(Weather::Fair);
    pool.import();
    pool.yard.nacre(&["pool", "destroy", "%"]);
}

/// Another machine: namespaces with another host name, machine id and directory of sockets.
struct Machine {
    holder: Child,
}

impl Machine {
    fn begun(name: &str, yard: &Yard) -> Machine {
        fs::write(yard.path("machine-id"), format!("{name}\n")).unwrap();
        let script = format!(
            "hostname {name}; mount -t tmpfs -o mode=700 none /run/nacre; [ ! -e /etc/machine-id ] || mount --bind {} /etc/machine-id; touch {}; exec sleep 600",
            yard.path("machine-id").display(),
            yard.path("machine").display()
        );
        let mut command = Command::new("setpriv");
        command.args([
            "--pdeathsig",
            "KILL",
            "--",
            "unshare",
            "-m",
            "-u",
            "--propagation",
            "slave",
            "sh",
            "-c",
            &script,
        ]);
        let holder = command.stdin(Stdio::null()).spawn().unwrap();
        eventually("another machine", || yard.path("machine").exists());
        Machine { holder }
    }

    /// Runs the program on that machine; returns its success and its output.
    fn nacre(&self, yard: &Yard, words: &[&str]) -> (bool, String) {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holder.id().to_string(), "-m", "-u", "--wd=/"]).arg(nacre()).args(words);
        command.env("NACRE_STATE_DIR", yard.path("other-state")).env("LC_ALL", "C").env("NO_COLOR", "1");
        let output = finish(&mut command);
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

#[test]
fn one_of_two_machines_has_the_pool() {
    needs!(as_root());
    let pool = InBucket::made(&["-o", "log=remote"]);
    pool.sh("echo first > at/a; sync at/a");
    let machine = Machine::begun("elsewhere", &pool.yard);
    let keys = pool.yard.path("keys").display().to_string();
    let way = ["--endpoint", &pool.moto.endpoint, "--profile", "test", "--credentials-file", &keys];
    let altroot = pool.yard.path("there").display().to_string();
    let import = |more: &[&str]| {
        machine.nacre(&pool.yard, &[&["pool", "import", "-R", &altroot][..], more, &way, &[&pool.address]].concat())
    };
    // A writer that was idle for long is no reason: it is asked for.
    let (done, said) = import(&[]);
    assert!(
        !done && said.contains("previously in use from another system") && said.contains("Last accessed by"),
        "{said}"
    );
    pool.sh("echo second > at/b; sync at/b");
    let (done, said) = import(&["-f"]);
    assert!(done, "{said}");
    let (done, said) = machine.nacre(&pool.yard, &["pool", "status", &pool.name]);
    assert!(done && said.contains("ONLINE"), "{said}");
    let (_, mounted) = machine.nacre(&pool.yard, &["fs", "list", "-H", "-o", "name,mounted", &pool.name]);
    assert!(mounted.contains("yes"), "{mounted}");
    // The previous machine acknowledges nothing any more, and names the machine that has the pool.
    let late =
        finish(Command::new("sh").args(["-c", "echo third > at/c; sync at/c"]).current_dir(pool.yard.place.path()));
    assert!(!late.status.success(), "{late:?}");
    eventually("a suspended pool", || pool.status().contains("SUSPENDED"));
    // A block of the log has less information than a root.
    let status = pool.status();
    assert!(
        status.contains("taken over by 'elsewhere'") || status.contains("another program writes to the pool"),
        "{status}"
    );
    let removed = pool.moto.keys("one/tank/seg/").len();
    pool.yard.nacre(&["pool", "export", "-f", "%"]);
    assert_eq!(pool.moto.keys("one/tank/seg/").len(), removed, "it removes nothing of the other's");
    // What it acknowledged before is there.
    let (done, said) = machine.nacre(&pool.yard, &["pool", "scrub", "-w", &pool.name]);
    assert!(done, "{said}");
    let (done, said) = machine.nacre(&pool.yard, &["pool", "export", &pool.name]);
    assert!(done, "{said}");
    // It was exported: no other machine has to be asked.
    pool.import();
    assert_eq!(pool.sh("cat at/a at/b; ls at"), "first\nsecond\na\nb\n");
    pool.yard.nacre(&["pool", "destroy", "%"]);
}

/// With `log=local` an fsync needs only this machine, and a takeover loses the writes that are in
/// its log alone.
#[test]
fn a_log_on_this_machine_has_what_was_synced() {
    needs!(as_root());
    let pool = InBucket::made(&["--log-dir", "log"]);
    assert_eq!(pool.yard.nacre(&["pool", "get", "-H", "-o", "value", "log", "%"]), "local\n");
    let again = |words: &[&str]| {
        pool.killed();
        pool.moto.weather(Weather::Fair);
        pool.yard.nacre(&[&["pool", "import"], words, &["%"]].concat());
    };
    let logs = || pool.sh("ls log/*");
    // The first fsync is a commit, which names the log; after it the store need not be reachable.
    pool.sh("echo 0 > at/f0; sync at/f0");
    for round in 1..4 {
        pool.moto.weather(Weather::Closed);
        pool.sh(&format!("echo {round} > at/f{round}; sync at/f{round}; mv at/f{round} at/g{round}; sync at/g{round}"));
        again(&[]);
        assert_eq!(pool.sh("cat at/g* | tail -n 1"), format!("{round}\n"));
        pool.sh(&format!("echo {round} > at/h{round}; sync at/h{round}"));
        assert_eq!(logs().lines().count(), 1, "those before are gone: {}", logs());
    }
    // From one log to another and back, while files are written.
    for (round, log) in ["remote", "local", "none", "local", "remote", "none", "local"].into_iter().enumerate() {
        pool.yard.nacre(&["pool", "set", &format!("log={log}"), "%"]);
        pool.sh(&format!("echo {round} > at/s{round}; sync at/s{round}"));
        pool.sh(&format!("echo {round} >> at/s; sync at/s"));
        if round % 2 == 1 {
            again(&[]);
        }
    }
    again(&[]);
    assert_eq!(pool.sh("cat at/s; cat at/s? | cmp - at/s"), "0\n1\n2\n3\n4\n5\n6\n");
    // The machine is lost: the committed state is there, and an import reports the missing log.
    pool.yard.nacre(&["pool", "sync", "%"]);
    pool.moto.weather(Weather::Closed);
    pool.sh("echo lost > at/lost; sync at/lost");
    pool.killed();
    pool.moto.weather(Weather::Fair);
    pool.sh("mv log lost-log; mkdir log");
    let (_, said) = pool.yard.refused(&["pool", "import", "%"]);
    assert!(said.contains("what was synced last is in a log on this machine") && said.contains("-m"), "{said}");
    pool.yard.nacre(&["pool", "import", "-m", "%"]);
    assert_eq!(pool.sh("test ! -e at/lost; cat at/s | wc -l"), "7\n");
    // Another machine takes over: it says that it does without, and the log is kept aside here.
    pool.sh("echo kept > at/kept; sync at/kept");
    pool.moto.weather(Weather::Closed);
    pool.sh("echo lost > at/lost; sync at/lost");
    pool.killed();
    pool.moto.weather(Weather::Fair);
    let machine = Machine::begun("elsewhere", &pool.yard);
    let keys = pool.yard.path("keys").display().to_string();
    let way = ["--endpoint", &pool.moto.endpoint, "--profile", "test", "--credentials-file", &keys];
    let import = |more: &[&str]| {
        machine.nacre(&pool.yard, &[&["pool", "import", "-N", "-f"][..], more, &way, &[&pool.address]].concat())
    };
    let (done, said) = import(&[]);
    assert!(!done && said.contains("what was synced last is in a log on '"), "{said}");
    let (done, said) = import(&["-m"]);
    assert!(done, "{said}");
    let (done, said) = machine.nacre(&pool.yard, &["pool", "export", &pool.name]);
    assert!(done, "{said}");
    let said = pool.yard.nacre(&["pool", "import", "%"]);
    assert!(logs().contains(".aside"), "{said}{}", logs());
    assert_eq!(pool.sh("cat at/kept; test ! -e at/lost"), "kept\n");
    pool.yard.nacre(&["pool", "destroy", "%"]);
    assert_eq!(pool.sh("ls log"), "");
}

#[test]
fn what_cannot_be_changes_nothing() {
    needs!(as_root());
    let pool = InBucket::made(&[]);
    let before = pool.moto.keys("");
    let other = pool.yard.name("no");
    let refused = |way: &[&str], address: &str| {
        let (_, said) = pool.yard.refused(&[&["pool", "create", "-m", "none"][..], way, &[&other, address]].concat());
        assert!(!said.contains(SECRET));
        said
    };
    assert!(refused(&pool.way(), "s3://nothing/p").contains("there is no bucket 'nothing'"));
    assert!(refused(&pool.way(), &pool.address).contains(&format!("is part of active pool '{}'", pool.name)));
    // The bucket of this name on another server is another one.
    let elsewhere = Moto::start();
    let way = ["--endpoint", &elsewhere.endpoint, "--profile", "test", "--credentials-file", "keys"];
    pool.yard.nacre(&[&["pool", "create", "-m", "none"][..], &way, &[&other, &pool.address]].concat());
    assert!(!elsewhere.keys("one/").is_empty());
    pool.yard.nacre(&["pool", "destroy", &other]);
    let endpoint = ["--endpoint", pool.moto.endpoint.as_str()];
    let without = [&endpoint[..], &["--credentials-file", "none"]].concat();
    assert!(refused(&without, "s3://pools/new").contains("credentials in"));
    let without = [&endpoint[..], &["--credentials-file", "keys", "--profile", "other"]].concat();
    assert!(refused(&without, "s3://pools/new").contains("profile 'other' is not there"));
    // A program prints the keys, also where the pool is found again.
    let printed = format!(r#"{{"Version": 1, "AccessKeyId": "printed", "SecretAccessKey": "{SECRET}"}}"#);
    fs::write(pool.yard.path("printed"), printed).unwrap();
    let file = format!("[by]\ncredential_process = cat {}\n", pool.yard.path("printed").display());
    fs::write(pool.yard.path("by"), file).unwrap();
    let by = [&endpoint[..], &["--credentials-file", "by", "--profile", "by"]].concat();
    pool.yard.nacre(&[&["pool", "create", "-m", "none"][..], &by, &[&other, "s3://pools/by"]].concat());
    pool.yard.end(&other, Signal::KILL);
    pool.yard.nacre(&["pool", "import", &other]);
    pool.yard.nacre(&["pool", "destroy", &other]);
    assert!(pool.moto.heads().iter().any(|head| head.contains("Credential=printed/")));
    fs::write(pool.yard.path("printed"), SECRET).unwrap();
    assert!(refused(&by, "s3://pools/new").contains("credential_process prints no credentials"));
    assert!(refused(&pool.way(), "s3://pools/a//b").contains("a prefix has"));
    assert!(refused(&pool.way(), "gcs://pools/b").contains("pools lie on devices, in s3://BUCKET/PREFIX"));
    pool.moto.weather(Weather::Forbidden);
    assert!(
        refused(&pool.way(), "s3://pools/new")
            .contains("the server refuses these credentials (403 SignatureDoesNotMatch)")
    );
    for (weather, why) in [
        (Weather::Skewed, "the clocks of this machine and of the server are too far apart (403 RequestTimeTooSkewed)"),
        (Weather::Full, "the store has no room left (507 XMinioStorageFull)"),
        (Weather::ReadOnly, "the server refuses these credentials (403 AccessDenied)"),
    ] {
        pool.moto.weather(weather);
        let said = refused(&pool.way(), "s3://pools/new");
        assert!(said.contains(why), "{said}");
    }
    pool.moto.weather(Weather::Careless);
    assert!(refused(&pool.way(), "s3://pools/new").contains("this store makes an object that is there once more"));
    pool.moto.weather(Weather::Fair);
    pool.yard.nacre(&["pool", "export", "%"]);
    assert!(refused(&pool.way(), &pool.address).contains(&format!("holds exported pool '{}'", pool.name)));
    for (weather, why) in
        [(Weather::Skewed, "too far apart"), (Weather::Full, "no room left"), (Weather::ReadOnly, "403")]
    {
        pool.moto.weather(weather);
        let (_, said) = pool.yard.refused(&["pool", "import", "%"]);
        assert!(said.contains(why), "{said}");
    }
    pool.moto.weather(Weather::Careless);
    let (_, said) = pool.yard.refused(&["pool", "import", "%"]);
    assert!(said.contains("this store makes an object that is there once more"), "{said}");
    pool.moto.weather(Weather::Fair);
    pool.import();
    // Two at once in one place: one of them has it, if any.
    let both: Vec<String> = ["a", "b"].map(|short| pool.yard.name(short)).into();
    let create = |name: &String| {
        let words = [&["pool", "create", "-m", "none"][..], &pool.way(), &[name, "s3://pools/both"]].concat();
        pool.yard.run(&words).status.success()
    };
    let made: Vec<bool> = thread::scope(|scope| {
        let both: Vec<_> = both.iter().map(|name| scope.spawn(move || create(name))).collect();
        both.into_iter().map(|made| made.join().unwrap()).collect()
    });
    assert!(made != [true, true], "both have it");
    for (name, _) in both.iter().zip(&made).filter(|(_, made)| **made) {
        assert!(pool.yard.nacre(&["pool", "check", name]).starts_with("no problems: "));
        pool.yard.nacre(&["pool", "destroy", name]);
        assert_eq!(pool.moto.keys("both/"), Vec::<String>::new());
    }
    for words in
        [&["add", "%", "/x"][..], &["trim", "%"], &["offline", "%", "s3://pools/one/tank"], &["set", "log=here", "%"]]
    {
        pool.yard.refused(&[&["pool"], words].concat());
    }
    assert!(
        pool.yard.refused(&["pool", "add", "%", "/x"]).1.contains("it lies in an object store, and has no devices")
    );
    let roots = |keys: &[String]| keys.iter().filter(|key| key.contains("/pool/")).cloned().collect::<Vec<_>>();
    assert_eq!(roots(&before)[0], roots(&pool.moto.keys(""))[0], "the pool is the same");
    assert!(!pool.moto.keys("").iter().any(|key| key.starts_with("new") || key.contains("probe")));
    pool.yard.nacre(&["pool", "destroy", "%"]);
}

#[test]
fn a_pool_in_a_directory_needs_no_server() {
    needs!(as_root());
    let yard = Yard::new();
    let (name, at) = (yard.name("dir"), yard.path("at"));
    let bucket = yard.path("bucket");
    let address = format!("file://{}", bucket.display());
    let create = ["pool", "create", "-o", "log=none", "-m", at.to_str().unwrap(), &name, &address];
    assert!(yard.refused(&create).1.contains("there is no directory"));
    fs::create_dir(&bucket).unwrap();
    yard.nacre(&create);
    let count =
        |kind: &str| sh(&bucket, &format!("find {kind} -type f 2>/dev/null | wc -l")).trim().parse::<u64>().unwrap();
    let synced = |number: u32| sh(&at, &format!("echo {number} > f{number}; sync f{number}"));
    // An fsync is a commit, and nothing goes to the log.
    let before = count("roots");
    (0..3).for_each(|number| drop(synced(number)));
    assert!(count("roots") >= before + 3, "{} roots, {before} before", count("roots"));
    assert_eq!(count("log"), 0);
    yard.end(&name, Signal::KILL);
    yard.nacre(&["pool", "import", "%"]);
    assert_eq!(sh(&at, "cat f0 f1 f2"), "0\n1\n2\n");
    // With the log, an fsync is an object of it.
    yard.nacre(&["pool", "set", "log=remote", "%"]);
    assert_eq!(yard.nacre(&["pool", "get", "-H", "-o", "value", "log", "%"]), "remote\n");
    synced(3);
    assert!(count("log") > 0);
    yard.end(&name, Signal::KILL);
    yard.nacre(&["pool", "import", "%"]);
    assert_eq!(sh(&at, "cat f3"), "3\n");
    // Much is written ahead of the commits.
    sh(&at, "head -c 150000000 /dev/zero | tr '\\0' x > much; sync much; cksum much > ../sum; sync -f .");
    yard.nacre(&["pool", "export", "%"]);
    yard.nacre(&["pool", "import", "%"]);
    sh(&at, "cksum much | cmp - ../sum");
    // Another pool below a prefix that looks like the objects of this one: neither takes the other's.
    let below = yard.name("below");
    let roots = bucket.join("roots");
    yard.nacre(&["pool", "create", "-m", "none", &below, &format!("file://{}", roots.display())]);
    yard.nacre(&["pool", "sync", &below]);
    for words in [&["export", "%"][..], &["import", "%"], &["sync", "%"], &["check", "%"], &["destroy", "%"]] {
        yard.nacre(&[&["pool"], words].concat());
    }
    assert!(yard.nacre(&["pool", "check", &below]).starts_with("no problems: "));
    yard.nacre(&["pool", "destroy", &below]);
    assert_eq!(sh(&bucket, "find . -type f"), "");
}
