//! Entry points for the fuzzer (crates/fuzz) to parsers that are otherwise private. Not part of this crate's API.

use crate::abi::{InHeader, Pod};
use crate::mount::see_all;
use crate::request::{Form, fixed_size, parse};

/// Parses a request as the device delivers it: header, struct, names and data.
pub fn request(message: &[u8]) {
    let Some(header) = InHeader::read(message) else { return };
    let body = message.get(size_of::<InHeader>()..).unwrap_or_default();
    for setxattr_ext in [false, true] {
        let form = Form { setxattr_ext };
        let Some((fixed, rest)) = body.split_at_checked(fixed_size(header.opcode, form)) else { continue };
        let Ok(request) = parse(&header, fixed, rest, form) else { continue };
        assert!(request.groups.iter().count() <= rest.len());
        assert!(request.security.iter().all(|(name, value)| name.len() + value.len() < rest.len()));
        drop(format!("{:?}", request.op));
    }
}

/// Parses a mount table, and resolves the path of each mount in it.
pub fn mount_table(table: &[u8]) {
    see_all(table);
}
