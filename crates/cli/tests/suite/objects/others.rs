//! Stores that do not speak S3, through the real program: Google's, by moto behind a gate that takes its
//! requests; Azure's, where `NACRE_AZURE` holds the connection string of one with a container `pools` that
//! may be written to (Azurite's, say).

use std::{env, fs, path::PathBuf, process::Command};

use super::{Machine, SECRET, TREE};
use crate::mounting::{as_root, eventually, finish, needs, pools::Yard, sh, text};
use crate::s3_server::Moto;

/// A pool in a store that is not S3.
struct There {
    yard: Yard,
    name: String,
    at: PathBuf,
    address: String,
    /// Options for the access to the store.
    way: Vec<String>,
    /// Secret that no output may contain.
    secret: String,
}

impl There {
    fn new(address: &str, way: &[&str], keys: &str, secret: &str) -> There {
        let yard = Yard::new();
        let (name, at, file) = (yard.name("st"), yard.path("at"), yard.path("keys"));
        fs::write(&file, keys).unwrap();
        let file = ["--credentials-file".to_owned(), file.display().to_string()];
        let way = way.iter().map(|word| (*word).to_owned()).chain(file).collect();
        There { yard, name, at, address: address.to_owned(), way, secret: secret.to_owned() }
    }

    fn with_way<'a>(&'a self, words: &[&'a str], last: &[&'a str]) -> Vec<&'a str> {
        words.iter().copied().chain(self.way.iter().map(String::as_str)).chain(last.iter().copied()).collect()
    }

    fn nacre(&self, words: &[&str]) -> String {
        self.yard.nacre(words)
    }

    fn sh(&self, script: &str) -> String {
        sh(self.yard.place.path(), script)
    }

    fn killed(&self) {
        self.yard.end(&self.name, rustix::process::Signal::KILL);
    }

    /// All that a pool in a bucket is for.
    fn lives(&self) {
        let (at, address) = (self.at.to_str().unwrap(), self.address.as_str());
        let create = self.with_way(&["pool", "create", "-m", at], &[&self.name, address]);
        self.nacre(&create);
        let other = self.yard.name("no");
        let (_, said) = self.yard.refused(&self.with_way(&["pool", "create", "-m", "none"], &[&other, address]));
        assert!(said.contains(&format!("is part of active pool '{}'", self.name)), "{said}");
        self.sh(TREE);
        for log in ["local", "remote", "none"] {
            self.nacre(&["pool", "set", &format!("log={log}"), "%"]);
            self.sh(&format!("echo {log} > at/{log}; sync at/{log}; echo again >> at/{log}; sync at/{log}"));
            self.killed();
            self.nacre(&["pool", "import", "%"]);
            assert_eq!(self.sh(&format!("cat at/{log}")), format!("{log}\nagain\n"));
        }
        self.nacre(&["pool", "sync", "%"]);
        self.sh("cd at && sha256sum --quiet -c ../sums");
        // A reader elsewhere in the machine.
        let (reader, root) = (self.yard.name("re"), self.yard.path("there"));
        let words = ["pool", "import", "-o", "readonly=on", "-t", "-R", root.to_str().unwrap()];
        self.nacre(&self.with_way(&words, &[address, &reader]));
        self.sh("echo new > at/new");
        self.nacre(&["pool", "sync", "%"]);
        let seen = root.join(self.at.strip_prefix("/").unwrap()).join("new");
        eventually("what is new", || fs::read_to_string(&seen).is_ok_and(|content| content == "new\n"));
        self.nacre(&["pool", "export", &reader]);
        self.nacre(&["pool", "scrub", "-w", "%"]);
        assert!(self.nacre(&["pool", "status", "%"]).contains(" with 0 errors on "));
        // What was asked of it is counted by kind.
        let json: serde_json::Value = serde_json::from_str(&self.nacre(&["pool", "status", "--json", "%"])).unwrap();
        let asked = &json["pools"][&self.name]["vdevs"][&self.name]["vdevs"][address]["requests"];
        let of = |kind: &str| asked[kind].as_u64().unwrap();
        assert!(of("puts") > 3 && of("gets") > 3 && of("lists") > 0 && of("again") == 0, "{asked}");
        // Taken over.
        let machine = Machine::begun("elsewhere", &self.yard);
        let altroot = self.yard.path("taken").display().to_string();
        let import = self.with_way(&["pool", "import", "-R", &altroot], &[address]);
        let (done, said) = machine.nacre(&self.yard, &import);
        assert!(!done && said.contains("previously in use from another system"), "{said}");
        let import = self.with_way(&["pool", "import", "-f", "-R", &altroot], &[address]);
        let (done, said) = machine.nacre(&self.yard, &import);
        assert!(done, "{said}");
        let mut late = Command::new("sh");
        late.args(["-c", "echo late > at/late; sync at/late"]).current_dir(self.yard.place.path());
        assert!(!finish(&mut late).status.success());
        eventually("a suspended pool", || self.nacre(&["pool", "status", "%"]).contains("taken over by 'elsewhere'"));
        self.nacre(&["pool", "export", "-f", "%"]);
        let (done, said) = machine.nacre(&self.yard, &["pool", "export", &self.name]);
        assert!(done, "{said}");
        self.nacre(&["pool", "import", "%"]);
        self.sh("cd at && sha256sum --quiet -c ../sums && test ! -e late");
        // Nothing of the secret is anywhere.
        let shown = self.sh("cat state/pools/*; cat /run/nacre/*.imported /run/nacre/*.log; true");
        let arguments = text(&fs::read(format!("/proc/{}/cmdline", self.yard.process(&self.name))).unwrap());
        let history = self.nacre(&["pool", "history", "-il", "%"]);
        for said in [&shown, &arguments, &history, &self.nacre(&["pool", "status", "--json", "%"])] {
            assert!(!said.contains(&self.secret));
        }
        assert!(shown.contains("credentials-file="), "what is looked through has what it should");
        self.nacre(&["pool", "destroy", "%"]);
        let (_, said) = self.yard.refused(&self.with_way(&["pool", "import"], &[address]));
        assert!(said.contains("no such pool available"), "{said}");
    }
}

#[test]
fn a_pool_lives_in_a_bucket_of_google() {
    needs!(as_root());
    let moto = Moto::start();
    moto.speaks_google();
    let key = format!(
        r#"{{"type": "service_account", "client_email": "me", "private_key_id": "1", "private_key": "{SECRET}", "disable_oauth": true}}"#
    );
    let pool = There::new("gs://pools/one/tank", &["--endpoint", &moto.endpoint], &key, SECRET);
    pool.lives();
    assert_eq!(moto.keys("one/"), Vec::<String>::new());
    let heads = moto.heads();
    assert!(heads.iter().any(|head| head.contains("x-goog-if-generation-match: 0")));
    // A store that does not keep the condition is refused.
    moto.weather(super::Weather::Careless);
    let (_, said) = pool.yard.refused(&pool.with_way(&["pool", "create", "-m", "none"], &[&pool.name, "gs://pools/x"]));
    assert!(said.contains("this store makes an object that is there once more"), "{said}");
    let (_, said) = pool.yard.refused(&pool.with_way(&["pool", "create"], &[&pool.name, "gs://nothing/x"]));
    assert!(said.contains("there is no bucket 'nothing'"), "{said}");
}

#[test]
fn a_pool_lives_in_a_container_of_azure() {
    needs!(as_root());
    let Ok(connection) = env::var("NACRE_AZURE") else {
        eprintln!("not run: NACRE_AZURE does not hold the connection string of a container 'pools'");
        return;
    };
    let secret = connection.split(';').find_map(|part| part.strip_prefix("AccountKey=")).unwrap().to_owned();
    let pool = There::new("az://pools/one/tank", &[], &connection, &secret);
    pool.lives();
    let (_, said) = pool.yard.refused(&pool.with_way(&["pool", "create"], &[&pool.name, "az://nothing/x"]));
    assert!(said.contains("there is no bucket 'nothing'"), "{said}");
    fs::write(pool.yard.path("keys"), connection.replace(&secret, "c2VjcmV0")).unwrap();
    let (_, said) = pool.yard.refused(&pool.with_way(&["pool", "create"], &[&pool.name, "az://pools/x"]));
    assert!(said.contains("the server refuses these credentials (403 AuthorizationFailure)"), "{said}");
}
