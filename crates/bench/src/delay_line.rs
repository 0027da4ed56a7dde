//! A TCP proxy with a delay, which simulates the distance to a server: bytes and replies arrive later. Concurrency
//! and throughput are not limited.
//!
//! Called by `buckets`, for remote stores. The threads end with their connections; the port stays open until the
//! bench ends.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::clock;
use crate::clock::Deadline;

/// Bytes per read.
const PIECE: usize = 64 << 10;
/// Limit of chunks in transit in one direction of one connection.
const ON_THE_WAY: usize = 1024;

/// Starts the proxy and returns its address; the round trip to the server takes `there_and_back`. Without a delay,
/// returns the server's own address.
pub fn start(server: SocketAddr, there_and_back: Duration) -> io::Result<SocketAddr> {
    if there_and_back.is_zero() {
        return Ok(server);
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let here = listener.local_addr()?;
    thread::Builder::new().name("delay line".to_owned()).spawn(move || {
        for client in listener.incoming().flatten() {
            // If the server cannot be reached, the client's connection is closed.
            drop(connect(client, server, there_and_back / 2));
        }
    })?;
    Ok(here)
}

fn connect(client: TcpStream, server: SocketAddr, delay: Duration) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    one_way(client.try_clone()?, server.try_clone()?, delay)?;
    one_way(server, client, delay)
}

fn one_way(mut from: TcpStream, mut to: TcpStream, delay: Duration) -> io::Result<()> {
    let (sent, arriving) = sync_channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    thread::Builder::new().spawn(move || drop(take(&mut from, &sent, delay)))?;
    thread::Builder::new().spawn(move || {
        for (due, piece) in arriving {
            wait(due);
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        // The other side may have closed already.
        let _ = to.shutdown(Shutdown::Write);
    })?;
    Ok(())
}

/// Reads until the end of the stream.
fn take(from: &mut TcpStream, sent: &SyncSender<(Instant, Vec<u8>)>, delay: Duration) -> io::Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        let count = from.read(&mut buffer)?;
        let piece = buffer.get(..count).unwrap_or_default().to_vec();
        if piece.is_empty() || sent.send((clock::now() + delay, piece)).is_err() {
            return Ok(());
        }
    }
}

fn wait(due: Instant) {
    let left = due.saturating_duration_since(clock::now());
    Deadline::after(left).pause(left);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_arrive_in_order_and_the_end_as_well() {
        let echo = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = echo.local_addr().unwrap();
        thread::spawn(move || {
            let (mut client, _) = echo.accept().unwrap();
            let mut all = Vec::new();
            client.read_to_end(&mut all).unwrap();
            client.write_all(&all).unwrap();
        });
        let delay = Duration::from_millis(20);
        let (start, here) = (clock::now(), super::start(server, delay).unwrap());
        assert_ne!(here, server);
        let mut client = TcpStream::connect(here).unwrap();
        let sent: Vec<u8> = (0..300_000u32).map(|at| (at % 251) as u8).collect();
        client.write_all(&sent).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut back = Vec::new();
        client.read_to_end(&mut back).unwrap();
        assert!(back == sent && start.elapsed() >= delay);
        assert_eq!(super::start(server, Duration::ZERO).unwrap(), server);
    }
}
