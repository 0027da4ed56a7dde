//! The upper as a tar archive in the form of OCI's layers: whiteouts `.wh.NAME`, opaque directories `.wh..wh..opq`,
//! attributes and long names as PAX records, further names as hard links. Holes are data.

mod export;
mod import;

pub use export::export;
pub use import::import;
#[cfg(test)]
pub(crate) use import::line_of;

/// Prefix of the PAX records of extended attributes.
const XATTR: &str = "SCHILY.xattr.";
