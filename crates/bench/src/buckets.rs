//! File systems in a bucket of an object store: nacre's pools and JuiceFS, over an S3 server that runs for one
//! visit, with a simulated distance (`delay_line`); and bare objects, which curl puts and gets.
//!
//! Called by `mounted`. The server is versitygw if it is installed, otherwise moto, which keeps everything in
//! memory. All local state of a file system is in one directory, through which its processes are found.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::clock::{self, Deadline};
use crate::delay_line;
use crate::failure::{Doing, Failure};
use crate::holders;
use crate::mounts;
use crate::programs;
use crate::target::{Bucket, BucketOf, Objects};
use crate::workload::Material;

const BUCKET: &str = "bench";
const POOL: &str = "s3://bench/pool";
const KEY: &str = "bench";
const SECRET: &str = "bench-secret";
/// Deadline for a server to answer, and for a mount to end.
const PATIENCE: Duration = Duration::from_secs(20);
const ASKED_AGAIN: Duration = Duration::from_millis(20);
/// Size of curl's objects in bytes: the maximum of a pool's objects.
const OBJECT: usize = 8 << 20;
/// Number of concurrent transfers by curl: as many as for a pool.
const PARALLEL: &str = "8";

/// Returns the installed S3 server.
fn server() -> Option<(&'static str, PathBuf)> {
    ["versitygw", "moto_server"].into_iter().find_map(|name| Some((name, programs::find(name)?)))
}

/// Returns why no bucket can be made on this machine, if so.
pub fn obstacle() -> Option<String> {
    server().is_none().then(|| "neither versitygw nor moto_server is installed".to_owned())
}

/// An S3 server with an empty bucket.
#[derive(Debug)]
pub struct Store {
    /// The server; `None` if a directory stands for the bucket.
    process: Option<Child>,
    /// Address of the server, without the simulated distance.
    at: SocketAddr,
    /// Directory in which it stores objects as files, if it does.
    files: Option<PathBuf>,
    /// URL of the server, with the simulated distance.
    endpoint: String,
}

impl Store {
    /// Starts the server; it may store objects in `directory`.
    pub fn start(directory: &Path, delay: Duration) -> Result<Self, Failure> {
        let (name, program) = server().ok_or_else(|| Failure::new(obstacle().unwrap_or_default()))?;
        let failed = |error: std::io::Error| Failure::new(format!("starting {name}: {error}"));
        let bucket = directory.join(BUCKET);
        fs::create_dir_all(&bucket).doing("creating", &bucket)?;
        // Another process could take the port before the server does.
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr()).map_err(failed)?.port();
        let mut command = Command::new("setpriv");
        // The server must not survive the bench, however that ends.
        command.args(["--pdeathsig", "KILL"]).arg(program);
        if name == "versitygw" {
            command.env("ROOT_ACCESS_KEY", KEY).env("ROOT_SECRET_KEY", SECRET);
            command.args(["--quiet", "--port", &format!("127.0.0.1:{port}"), "posix"]).arg(directory);
        } else {
            command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        }
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = command.spawn().map_err(failed)?;
        let (at, deadline) = (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), Deadline::after(PATIENCE));
        while TcpStream::connect(at).is_err() {
            // There is no notification when it answers, but it ends if it cannot start.
            let ended = Deadline::after(ASKED_AGAIN).wait_for_child(&mut process).map_err(failed)?;
            if ended.is_some() || deadline.is_over() {
                return Err(Failure::new(format!("{name} does not answer")));
            }
        }
        let endpoint = format!("http://{}", delay_line::start(at, delay).map_err(failed)?);
        let store = Self { process: Some(process), at, files: (name == "versitygw").then_some(bucket), endpoint };
        if name == "moto_server" {
            moto(at, "PUT", "").map_err(|error| Failure::new(format!("making a bucket in {name}: {error}")))?;
        }
        Ok(store)
    }

    /// Makes a directory that stands for the bucket, without a server.
    pub fn directory(directory: &Path) -> Result<Self, Failure> {
        let bucket = directory.join(BUCKET);
        let pool = bucket.join("pool");
        fs::create_dir_all(&pool).doing("creating", &pool)?;
        let (at, endpoint) = (SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), String::new());
        Ok(Self { process: None, at, files: Some(bucket), endpoint })
    }

    /// Returns the number of objects with segments of our pool.
    pub fn segments(&self) -> Result<u64, Failure> {
        const PREFIX: &str = "pool/seg/";
        if let Some(files) = &self.files {
            let directories = fs::read_dir(files.join(PREFIX)).doing("listing", files)?;
            let count = |entry: fs::DirEntry| fs::read_dir(entry.path()).map_or(0, Iterator::count);
            return Ok(directories.flatten().map(count).sum::<usize>() as u64);
        }
        let (mut count, mut after) = (0, String::new());
        loop {
            let page = moto(self.at, "GET", &format!("?list-type=2&prefix={PREFIX}&start-after={after}"))
                .map_err(|error| Failure::new(format!("listing the bucket: {error}")))?;
            let keys = page.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>").map(|(key, _)| key));
            let keys: Vec<&str> = keys.collect();
            count += keys.len() as u64;
            match keys.last() {
                Some(last) if page.contains("<IsTruncated>true<") => after = (*last).to_owned(),
                _ => return Ok(count),
            }
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // It may have ended by itself, which its clients reported.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Returns how many whole objects this number of bytes is.
pub fn objects_of(bytes: u64) -> u64 {
    (bytes / OBJECT as u64).max(1)
}

/// Returns the bytes of this number of objects.
pub fn bytes_of(objects: u64) -> u64 {
    objects * OBJECT as u64
}

/// Sends a request about the bucket; moto does not verify signatures.
fn moto(at: SocketAddr, method: &str, query: &str) -> std::io::Result<String> {
    use std::io::{Error, Read, Write};
    let mut server = TcpStream::connect(at)?;
    let who = format!("AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request");
    let head = format!("{method} /{BUCKET}{query} HTTP/1.1\r\nHost: {at}\r\nContent-Length: 0\r\nConnection: close");
    let request = format!("{head}\r\nAuthorization: {who}, SignedHeaders=host, Signature=0\r\n\r\n");
    server.write_all(request.as_bytes())?;
    let mut answer = String::new();
    server.read_to_string(&mut answer)?;
    if answer.starts_with("HTTP/1.1 200") {
        Ok(answer)
    } else {
        Err(Error::other(answer.lines().next().unwrap_or("nothing").to_owned()))
    }
}

/// A file system in the bucket, with its mount point.
pub struct BucketSite<'a> {
    /// Kind of file system.
    pub bucket: Bucket,
    /// Server with the bucket.
    pub store: &'a Store,
    /// Directory of its local state.
    pub local: PathBuf,
    /// Mount point.
    pub point: &'a Path,
    /// Output of the program run last.
    pub log: PathBuf,
    /// Makes a command of nacre, with its directories.
    pub nacre: &'a dyn Fn() -> Result<Command, Failure>,
}

impl BucketSite<'_> {
    /// Its records of buckets are separate for each visit: the next server has another port.
    fn nacre(&self) -> Result<Command, Failure> {
        let mut command = (self.nacre)()?;
        command.env("NACRE_STATE_DIR", self.local.join("state"));
        Ok(command)
    }

    fn name() -> String {
        format!("nacre-bench-bucket-{}", std::process::id())
    }

    fn cache(&self) -> PathBuf {
        self.local.join("cache")
    }

    /// Returns JuiceFS' metadata database.
    fn names(&self) -> String {
        format!("sqlite3://{}", self.local.join("names.db").display())
    }

    fn juicefs(&self) -> Command {
        let mut command = Command::new("juicefs");
        command.env("HOME", &self.local).current_dir("/");
        command
    }

    fn run(&self, command: &mut Command) -> Result<(), Failure> {
        programs::run(command, &self.log).map(drop)
    }

    /// Makes the file system, or mounts it again with an empty cache on this machine.
    pub fn put_in_place(&self) -> Result<(), Failure> {
        let there = self.local.exists();
        for directory in [&self.local, &self.cache()] {
            fs::create_dir_all(directory).doing("creating", directory)?;
        }
        let mounted = match self.bucket.by {
            BucketOf::Nacre | BucketOf::NacreInDirectory if there => {
                self.run(self.nacre()?.args(["pool", "import", &Self::name()]))
            }
            BucketOf::Nacre => self.make_pool(),
            BucketOf::NacreInDirectory => self.make_pool_in_directory(),
            BucketOf::JuiceFs => self.mount_juicefs(there),
            BucketOf::Curl => {
                let object = self.local.join("object");
                return fs::write(&object, Material::Random.supply().block(0, OBJECT)).doing("writing", &object);
            }
        };
        mounted?;
        if mounts::is_mounted(self.point)? { Ok(()) } else { Err(Failure::new("nothing was mounted")) }
    }

    fn make_pool(&self) -> Result<(), Failure> {
        let keys = self.local.join("keys");
        let content = format!("[bench]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n");
        fs::write(&keys, content).doing("writing", &keys)?;
        let mut command = self.nacre()?;
        command.args(["pool", "create", "-m"]).arg(self.point).args(["--endpoint", &self.store.endpoint]);
        command.args(["--profile", "bench", "--credentials-file"]).arg(keys).arg("--cache-dir").arg(self.cache());
        self.run(command.args([&Self::name(), POOL]))
    }

    fn make_pool_in_directory(&self) -> Result<(), Failure> {
        let files = self.store.files.as_deref().ok_or_else(|| Failure::new("no directory stands for the bucket"))?;
        let mut command = self.nacre()?;
        command.args(["pool", "create", "-m"]).arg(self.point);
        self.run(command.args([Self::name(), format!("file://{}/pool", files.display())]))
    }

    fn mount_juicefs(&self, there: bool) -> Result<(), Failure> {
        let names = self.names();
        if !there {
            let bucket = format!("{}/{BUCKET}", self.store.endpoint);
            let mut command = self.juicefs();
            command.args([
                "format",
                "--storage",
                "s3",
                "--bucket",
                &bucket,
                "--access-key",
                KEY,
                "--secret-key",
                SECRET,
            ]);
            self.run(command.args(["--trash-days", "0", &names, BUCKET]))?;
        }
        let mut command = self.juicefs();
        command.args(["mount", "-d", "--no-usage-report", "--backup-meta", "0", "--cache-dir"]).arg(self.cache());
        self.run(command.arg("--log").arg(self.local.join("log")).arg(&names).arg(self.point))
    }

    /// Waits until everything written is in the store.
    pub fn settle(&self) -> Result<(), Failure> {
        match self.bucket.by {
            BucketOf::Nacre | BucketOf::NacreInDirectory => {
                self.run(self.nacre()?.args(["pool", "sync", &Self::name()]))
            }
            // They write at each close.
            BucketOf::JuiceFs | BucketOf::Curl => Ok(()),
        }
    }

    /// Puts objects of this many bytes in total, or gets them; returns the elapsed time.
    pub fn objects(&self, what: Objects) -> Result<Duration, Failure> {
        let mut command = Command::new("curl");
        command.args(["--silent", "--fail", "--parallel", "--parallel-immediate", "--parallel-max", PARALLEL]);
        command.args(["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", &format!("{KEY}:{SECRET}")]);
        // The payload is not hashed, and no `100 Continue` is awaited.
        command.args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "--header", "Expect:"]);
        let (Objects::Put(bytes) | Objects::Get(bytes)) = what;
        for number in 0..objects_of(bytes) {
            match what {
                Objects::Put(_) => command.arg("--upload-file").arg(self.local.join("object")),
                Objects::Get(_) => command.args(["--output", "/dev/null"]),
            };
            command.arg(format!("{}/{BUCKET}/object-{number}", self.store.endpoint));
        }
        let start = clock::now();
        self.run(&mut command)?;
        Ok(start.elapsed())
    }

    /// Returns how long after a commit a reader sees the file of this name that was made before the commit.
    pub fn follow(&self, name: &str) -> Result<Duration, Failure> {
        let (root, reader) = (self.local.join("reader"), format!("{}-reader", Self::name()));
        fs::create_dir_all(&root).doing("creating", &root)?;
        let mut command = self.nacre()?;
        command.args(["pool", "import", "-o", "readonly=on", "-t", "-R"]).arg(&root);
        command.args(["--endpoint", &self.store.endpoint, "--profile", "bench", "--credentials-file"]);
        command.arg(self.local.join("keys")).arg("--cache-dir").arg(self.local.join("reader-cache"));
        self.run(command.args([POOL, &reader]))?;
        let there = root.join(self.point.strip_prefix("/").unwrap_or(self.point)).join(name);
        let seen = self.seen(&self.point.join(name), &there);
        seen.and_then(|after| self.run(self.nacre()?.args(["pool", "export", &reader])).map(|()| after))
    }

    fn seen(&self, made: &Path, there: &Path) -> Result<Duration, Failure> {
        if !mounts::is_mounted(self.point)? || there.exists() {
            return Err(Failure::new("a reader sees what is not there"));
        }
        fs::write(made, "seen").doing("writing", made)?;
        self.settle()?;
        let (committed, deadline) = (clock::now(), Deadline::after(PATIENCE));
        while !there.exists() {
            if deadline.is_over() {
                return Err(Failure::new("a reader does not follow"));
            }
            deadline.pause(ASKED_AGAIN);
        }
        Ok(committed.elapsed())
    }

    /// Unmounts the file system and leaves it in the bucket, with no cache on this machine.
    pub fn leave(&self) -> Result<(), Failure> {
        let left = match self.bucket.by {
            BucketOf::Nacre | BucketOf::NacreInDirectory => {
                self.run(self.nacre()?.args(["pool", "export", &Self::name()]))
            }
            BucketOf::JuiceFs => self.run(self.juicefs().arg("umount").arg(self.point)),
            BucketOf::Curl => Ok(()),
        };
        // Also waits for its processes.
        let gone = if left.is_ok() { holders::end(&self.local) } else { holders::kill(&self.local) };
        mounts::below(self.point)?.iter().try_for_each(|point| mounts::detach(point))?;
        let cache = self.cache();
        left.and(gone).and(fs::remove_dir_all(&cache).doing("removing", &cache))
    }
}
