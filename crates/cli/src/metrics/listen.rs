//! `nacre metrics --listen`: serves the metrics over HTTP, for Prometheus.
//!
//! It answers `GET /metrics` and nothing else, one request per connection. Invariants: a request
//! has [`HEAD_MOST`] bytes and a connection [`PATIENCE`] at most; at most [`CONNECTIONS_MOST`] are
//! served at one time, others are refused; figures are gathered for one request at a time, and
//! requests within a second share them.

use crate::clock;
use nacre_daemon::failure::Failure;
use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Maximum length of a request, bytes: a line and its headers.
const HEAD_MOST: usize = 8 << 10;
/// Deadline for a client to send its request, and again to receive the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of connections that are served at one time.
const CONNECTIONS_MOST: usize = 16;
/// Maximum age of shared figures.
const FRESH: Duration = Duration::from_secs(1);
/// Stack size of a thread, bytes: answers of mounts are nested.
const STACK: usize = 1 << 20;

/// Parses `[ADDRESS:]PORT`; the loopback address where no address is given.
pub fn address(word: &str) -> Option<SocketAddr> {
    match word.parse::<u16>() {
        Ok(port) => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        Err(_) => word.parse().ok(),
    }
}

type Text = Box<dyn Fn() -> Result<String, Failure> + Send + Sync>;

/// State that all connections share.
struct Server {
    text: Text,
    /// The last text, and the time of its making.
    last: Mutex<Option<(Instant, Arc<String>)>>,
    connections: AtomicUsize,
}

/// Serves until the process ends.
///
/// # Errors
/// An address that cannot be listened on.
pub fn serve(address: SocketAddr, text: Text) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::io("cannot listen on", address, &error);
    let listener = TcpListener::bind(address).map_err(failed)?;
    let at = listener.local_addr().map_err(failed)?;
    nacre_daemon::report::tell(&format!("nacre: http://{at}/metrics"));
    let server = Arc::new(Server { text, last: Mutex::default(), connections: AtomicUsize::new(0) });
    loop {
        match listener.accept() {
            Ok((stream, _)) => begin(&server, stream),
            // The client has closed the connection, or no descriptors are available for a moment.
            Err(_) => clock::pause(Duration::from_millis(10)),
        }
    }
}

/// A served connection; counted until it is dropped.
struct Connection(Arc<Server>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::SeqCst);
    }
}

fn begin(server: &Arc<Server>, mut stream: TcpStream) {
    let others = server.connections.fetch_add(1, Ordering::SeqCst);
    let connection = Connection(Arc::clone(server));
    if others >= CONNECTIONS_MOST {
        let _ = stream.set_nonblocking(true);
        // A client that does not read the answer at once gets none.
        let _ = stream.write_all(&response("503 Service Unavailable", "", "too many at once\n"));
        return;
    }
    let serve = move || {
        let answer = match request(&stream, clock::now() + PATIENCE) {
            Ok(head) => connection.0.answer(&head),
            Err(Refused::Silent) => return,
            Err(Refused::TooLong) => response("431 Request Header Fields Too Large", "", "too long\n"),
        };
        // An error means that the client has closed the connection or missed the deadline.
        let _ = send(&stream, &answer, clock::now() + PATIENCE);
        // Unread input would make the kernel reset the connection and discard the sent answer.
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
        let _ = (&stream).take(HEAD_MOST as u64).read_to_end(&mut Vec::new());
    };
    // Without a thread the connection is closed.
    let _ = thread::Builder::new().name("nacre-http".to_owned()).stack_size(STACK).spawn(serve);
}

enum Refused {
    /// No complete request before the deadline.
    Silent,
    TooLong,
}

/// Reads a request to the end of its headers.
fn request(mut stream: &TcpStream, until: Instant) -> Result<Vec<u8>, Refused> {
    let (mut head, mut buffer) = (Vec::new(), [0; 1024]);
    loop {
        let left = until.saturating_duration_since(clock::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return Err(Refused::Silent);
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err(Refused::Silent),
            Ok(length) => head.extend_from_slice(buffer.get(..length).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Refused::Silent),
        }
        if head.windows(4).any(|end| end == b"\r\n\r\n") || head.windows(2).any(|end| end == b"\n\n") {
            return Ok(head);
        }
        if head.len() > HEAD_MOST {
            return Err(Refused::TooLong);
        }
    }
}

fn send(mut stream: &TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(clock::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn response(status: &str, headers: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n{headers}\r\n{body}",
        body.len()
    )
    .into_bytes()
}

impl Server {
    fn answer(&self, head: &[u8]) -> Vec<u8> {
        let line = head.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
        let mut words = line.split(|byte| *byte == b' ');
        let (method, path, version) = (words.next(), words.next().unwrap_or_default(), words.next());
        if !version.is_some_and(|version| version.starts_with(b"HTTP/1.")) || words.next().is_some() {
            return response("400 Bad Request", "", "this is no request\n");
        }
        if method != Some(b"GET") {
            return response("405 Method Not Allowed", "Allow: GET\r\n", "only GET\n");
        }
        if path.split(|byte| *byte == b'?').next() != Some(b"/metrics") {
            return response("404 Not Found", "", "only /metrics\n");
        }
        match self.figures() {
            Ok(text) => response("200 OK", "", &text),
            // Error texts contain paths, which remote clients must not see.
            Err(_) => response("500 Internal Server Error", "", "the figures cannot be gathered\n"),
        }
    }

    fn figures(&self) -> Result<Arc<String>, Failure> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return Ok(Arc::clone(text));
        }
        let text = Arc::new((self.text)()?);
        *last = Some((clock::now(), Arc::clone(&text)));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_this_machine_unless_it_is_said() {
        for (word, expected) in [
            ("9100", Some("127.0.0.1:9100")),
            ("0.0.0.0:80", Some("0.0.0.0:80")),
            ("[::1]:1", Some("[::1]:1")),
            ("host:1", None),
            ("70000", None),
            ("", None),
        ] {
            assert_eq!(address(word), expected.map(|text| text.parse().unwrap()), "{word}");
        }
    }

    #[test]
    fn only_one_thing_can_be_asked_and_figures_serve_several() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let text: Text = Box::new(move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok("a 1\n".to_owned())
        });
        let server = Server { text, last: Mutex::default(), connections: AtomicUsize::new(0) };
        for (head, status) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200"),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", "200"),
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("GET /metrics/../etc HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /metrics\r\n\r\n", "400"),
            ("GET  /metrics HTTP/1.1\r\n\r\n", "400"),
            ("\r\n\r\n", "400"),
            ("GET /metrics HTTP/1.1 x\r\n\r\n", "400"),
        ] {
            let answer = String::from_utf8(server.answer(head.as_bytes())).unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{head:?}: {answer}");
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }
}
