//! A server of S3 for tests: moto, which keeps buckets in memory, behind a proxy of our own (the
//! gate) that every request and reply passes through.
//!
//! The gate counts requests, and simulates failures of networks and servers: it is closed, answers
//! that the server is busy, loses replies, refuses credentials, or removes conditions. Without
//! moto, which scripts/setup installs, tests fail.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::mounting::eventually;

/// The bucket that is there.
pub const BUCKET: &str = "pools";

/// Behavior of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Weather {
    /// Everything passes.
    Fair,
    /// Connections are refused.
    Closed,
    /// One of three requests is answered with 503, and of one of three others the reply is lost.
    Foul,
    /// No credentials are good.
    Forbidden,
    /// The client's clock is wrong.
    Skewed,
    /// Nothing more is taken.
    Full,
    /// Credentials are good for reading alone.
    ReadOnly,
    /// Credentials are not good for removing anything.
    Keeping,
    /// Conditions of requests are not seen by the server.
    Careless,
}

/// State that the gate's threads share.
struct Gate {
    weather: AtomicU8,
    requests: AtomicU64,
    /// Requests that were answered otherwise than by the server.
    harmed: AtomicU64,
    server: u16,
    /// Whether it is asked as Google's stores are.
    is_google: AtomicBool,
    /// The heads of all requests.
    heads: Mutex<Vec<String>>,
}

/// The server.
pub struct Moto {
    /// Without, it is another one's.
    process: Option<Child>,
    gate: Arc<Gate>,
    /// Where the gate is.
    pub endpoint: String,
}

fn program() -> PathBuf {
    let set = std::env::var_os("NACRE_MOTO").map(PathBuf::from);
    set.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/moto/bin/moto_server"))
}

impl Moto {
    /// Starts it, with an empty bucket.
    pub fn start() -> Moto {
        assert!(program().exists(), "{} is not there: scripts/setup installs it", program().display());
        // A port that was free a moment ago is almost never taken by another process; if it is, the
        // next is tried.
        for _ in 0..5 {
            let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut command = Command::new(program());
            command.args(["-H", "127.0.0.1", "-p", &free.to_string()]);
            let mut process = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            eventually("a server, or its end", || {
                TcpStream::connect(("127.0.0.1", free)).is_ok() || process.try_wait().unwrap().is_some()
            });
            if process.try_wait().unwrap().is_some() {
                continue;
            }
            let moto = Moto::behind_a_gate(Some(process), free);
            assert_eq!(moto.ask("PUT", &format!("/{BUCKET}")).0, 200);
            return moto;
        }
        panic!("moto does not start");
    }

    fn behind_a_gate(process: Option<Child>, server: u16) -> Moto {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let gate = Arc::new(Gate {
            weather: AtomicU8::new(Weather::Fair as u8),
            requests: AtomicU64::new(0),
            harmed: AtomicU64::new(0),
            server,
            is_google: AtomicBool::new(false),
            heads: Mutex::default(),
        });
        let known = Arc::clone(&gate);
        // It ends with the test program.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let gate = Arc::clone(&known);
                thread::spawn(move || {
                    // What goes wrong here is what the test is about.
                    let _ = gate.pass(&client);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        Moto { process, gate, endpoint }
    }

    /// Switches to Google's protocol: requests are those of S3 except for the form of conditions
    /// and the source of credentials.
    pub fn speaks_google(&self) {
        self.gate.is_google.store(true, Ordering::SeqCst);
    }

    /// Creates another gate to the same server, for a client with read access only; it has its own
    /// counts. This object owns the server.
    pub fn gate_of_readers(&self) -> Moto {
        let readers = Moto::behind_a_gate(None, self.gate.server);
        readers.weather(Weather::ReadOnly);
        readers
    }

    /// From now on the gate does this.
    pub fn weather(&self, weather: Weather) {
        self.gate.weather.store(weather as u8, Ordering::SeqCst);
    }

    /// Requests so far.
    pub fn requests(&self) -> u64 {
        self.gate.requests.load(Ordering::SeqCst)
    }

    /// Requests so far that the gate has harmed.
    pub fn harmed(&self) -> u64 {
        self.gate.harmed.load(Ordering::SeqCst)
    }

    /// The heads of all requests so far.
    pub fn heads(&self) -> Vec<String> {
        self.gate.heads.lock().unwrap().clone()
    }

    /// The names of the objects below a prefix.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let (status, body) = self.ask("GET", &format!("/{BUCKET}?list-type=2&prefix={prefix}"));
        assert_eq!(status, 200, "{body}");
        let keys = body.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
        keys.map(ToOwned::to_owned).collect()
    }

    /// Asks the server itself.
    pub fn ask(&self, method: &str, path: &str) -> (u16, String) {
        let mut server = TcpStream::connect(("127.0.0.1", self.gate.server)).unwrap();
        write!(
            server,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n{SOMEBODY}Connection: close\r\n\r\n"
        )
        .unwrap();
        let mut reply = String::new();
        server.read_to_string(&mut reply).unwrap();
        (reply.split(' ').nth(1).unwrap().parse().unwrap(), reply)
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// moto believes everybody.
const SOMEBODY: &str = "Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0\r\n";
const BUSY: &str = "HTTP/1.1 503 Slow Down\r\nRetry-After: 0\r\nContent-Length: 45\r\nConnection: close\r\n\r\n<Error><Code>SlowDown</Code></Error>         ";
const SKEWED: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 49\r\nConnection: close\r\n\r\n<Error><Code>RequestTimeTooSkewed</Code></Error> ";
const FULL: &str = "HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 45\r\nConnection: close\r\n\r\n<Error><Code>XMinioStorageFull</Code></Error>";
const DENIED: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 41\r\nConnection: close\r\n\r\n<Error><Code>AccessDenied</Code></Error> ";
const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 51\r\nConnection: close\r\n\r\n<Error><Code>SignatureDoesNotMatch</Code></Error>  ";

impl Gate {
    /// Passes one request on, and its reply back.
    fn pass(&self, mut client: &TcpStream) -> std::io::Result<()> {
        client.set_read_timeout(Some(Duration::from_secs(60)))?;
        let weather = |wanted: Weather| self.weather.load(Ordering::SeqCst) == wanted as u8;
        if weather(Weather::Closed) {
            return Ok(());
        }
        let mut reader = BufReader::new(client);
        let (mut head, mut length) = (String::new(), 0);
        let is_condition =
            |name: &str| ["if-none-match:", "x-goog-if-"].iter().any(|condition| name.starts_with(condition));
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let name = line.to_ascii_lowercase();
            if let Some(value) = name.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
            if line == "\r\n" {
                break;
            }
            let left_out = name.starts_with("connection:") || is_condition(&name) && weather(Weather::Careless);
            if !left_out {
                head.push_str(&line);
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        self.heads.lock().unwrap().push(head.clone());
        if weather(Weather::Closed) {
            return Ok(());
        }
        let harm = match number % 6 {
            _ if weather(Weather::Forbidden) => Some(FORBIDDEN),
            _ if weather(Weather::Skewed) => Some(SKEWED),
            _ if weather(Weather::Full) && head.starts_with("PUT") => Some(FULL),
            _ if weather(Weather::ReadOnly) && !head.starts_with("GET") => Some(DENIED),
            _ if weather(Weather::Keeping) && (head.starts_with("DELETE") || head.starts_with("POST")) => Some(DENIED),
            1 | 4 if weather(Weather::Foul) => Some(BUSY),
            _ => None,
        };
        if let Some(harm) = harm {
            self.harmed.fetch_add(1, Ordering::SeqCst);
            return client.write_all(harm.as_bytes());
        }
        let mut server = TcpStream::connect(("127.0.0.1", self.server))?;
        if self.is_google.load(Ordering::SeqCst) {
            let of_google = |line: &&str| !line.to_ascii_lowercase().starts_with("authorization:");
            head = head.split_inclusive("\r\n").filter(of_google).collect::<String>() + SOMEBODY;
            head = head.replace("x-goog-if-generation-match: 0", "If-None-Match: *");
        }
        server.write_all(head.as_bytes())?;
        server.write_all(b"Connection: close\r\n\r\n")?;
        server.write_all(&body)?;
        let mut reply = Vec::new();
        server.read_to_end(&mut reply)?;
        if number % 6 == 2 && weather(Weather::Foul) {
            // The request was carried out, and its reply is lost.
            self.harmed.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        client.write_all(&reply)
    }
}
