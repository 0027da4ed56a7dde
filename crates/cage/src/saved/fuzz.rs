//! Entry points of the fuzzer (crates/fuzz) to the formats of checkpoint and log. Not part of this
//! crate's API.

use super::BootId;
use super::format::{Checkpoint, HEADER, Header, crc};
use super::replay::read_log;

/// Decodes the body of a checkpoint.
///
/// # Panics
/// If a decoded checkpoint does not survive encoding and decoding.
pub fn checkpoint(body: &[u8]) {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let bytes = [&b"nacreCP\x01"[..], &length.to_le_bytes(), &crc(body).to_le_bytes(), body].concat();
    if let Ok(read) = Checkpoint::decode(&bytes) {
        assert!(Checkpoint::decode(&read.encode()).is_ok_and(|again| again == read), "{read:?}");
    }
}

/// Decodes a log: records by their payloads, then arbitrary bytes.
///
/// # Panics
/// If more bytes are reported valid than exist.
pub fn log(payloads: &[&[u8]], rest: &[u8]) {
    let header = Header { generation: 1, boot: BootId([7; 16]) };
    let mut bytes = header.encode();
    for payload in payloads {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        for number in [length, !length, crc(payload)] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
    }
    bytes.extend_from_slice(rest);
    let length = bytes.len() as u64;
    if let Ok(Some(good)) = read_log(&*bytes, length, header, &mut super::replay::Merged::default()) {
        assert!(good >= HEADER as u64 && good <= length, "{good} of {length} bytes");
    }
}
