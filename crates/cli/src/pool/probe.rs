//! `nacre pool probe`: the label of one device, in lines that udev's `IMPORT{program}` reads.
//!
//! Keys and escapes follow udev's builtin `blkid`. Called by `run.rs`; udev calls the verb as root for every block
//! device that no other probe has recognized.
//!
//! Invariants: at most six blocks of 32 KiB are read, without a lock; a device that another program
//! has overwritten since, or whose pool was destroyed, is not reported as a member of a pool.

use nacre_daemon::{
    failure::{Exit, Failure},
    report::printable,
};
use nacre_pool::{
    device::FileDevice,
    label::{self, Identity, PoolState, VERSION},
};
use std::path::Path;

/// Returns the lines for udev about a device.
///
/// # Errors
/// The device cannot be read, or has no label of a pool that this program can read.
pub fn probe(path: &Path) -> Result<String, Failure> {
    let shown = printable(path.as_os_str().as_encoded_bytes());
    let device = FileDevice::open_unlocked(path).map_err(|error| Failure::io("cannot open", &shown, &error))?;
    let none = || Failure::new(format!("{shown}: it has no label of a pool")).exit(Exit::NotFound);
    let found = label::probe(&device).map_err(|error| Failure::new(format!("cannot read the label: {error}")))?;
    match found {
        // Valid labels at the end alone: remains of a former pool, or the labels of an image in a file of another file system.
        Some(identity) if !label::begins(&device, identity.pool) => Err(none()),
        Some(identity) if identity.state == PoolState::Destroyed => {
            let name = printable(identity.name.as_bytes());
            Err(Failure::new(format!("{shown}: its pool '{name}' is destroyed")).exit(Exit::NotFound))
        }
        Some(identity) => Ok(lines(&identity)),
        None => Err(none()),
    }
}

/// Returns the properties of a member in udev's database.
fn lines(identity: &Identity) -> String {
    let mut lines = format!("ID_FS_TYPE=nacre_member\nID_FS_USAGE=raid\nID_FS_VERSION={VERSION}\n");
    let name = identity.name.as_bytes();
    lines += &format!("ID_FS_LABEL={}\nID_FS_LABEL_ENC={}\n", replaced(name), encoded(name));
    let pool = identity.pool;
    lines += &format!("ID_FS_UUID={pool}\nID_FS_UUID_ENC={pool}\n");
    if let Some(member) = identity.members.get(usize::from(identity.index)) {
        let guid = member.guid;
        lines += &format!("ID_FS_UUID_SUB={guid}\nID_FS_UUID_SUB_ENC={guid}\n");
    }
    lines
}

/// Returns whether a byte is written as it is, in both forms of a value.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"#+-.:=@_".contains(&byte)
}

/// Returns a value with each byte that is not plain replaced by an underscore.
fn replaced(value: &[u8]) -> String {
    value.iter().map(|byte| if is_plain(*byte) { char::from(*byte) } else { '_' }).collect()
}

/// Returns a value with each byte that is not plain written as `\x20`.
fn encoded(value: &[u8]) -> String {
    let mut text = String::new();
    for byte in value {
        match is_plain(*byte) {
            true => text.push(char::from(*byte)),
            false => text += &format!("\\x{byte:02x}"),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_one_value_of_one_line() {
        let name = b"a b\nID_FS_TYPE=ext4\"$\\\xc3\xa9";
        assert_eq!(encoded(name), "a\\x20b\\x0aID_FS_TYPE=ext4\\x22\\x24\\x5c\\xc3\\xa9");
        assert_eq!(replaced(name), "a_b_ID_FS_TYPE=ext4_____");
    }
}
