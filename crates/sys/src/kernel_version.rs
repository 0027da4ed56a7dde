//! The version of the running kernel, for behaviour that no system call reports.

use std::sync::OnceLock;

/// Major and minor number of the running kernel; zeros if they cannot be read.
#[must_use]
pub fn kernel_version() -> (u32, u32) {
    static VERSION: OnceLock<(u32, u32)> = OnceLock::new();
    *VERSION.get_or_init(|| parse(&rustix::system::uname().release().to_string_lossy()))
}

fn parse(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_as_distributions_write_them() {
        assert_eq!(parse("6.12.48+deb13-amd64"), (6, 12));
        assert_eq!(parse("5.14.0-503.el9.x86_64"), (5, 14));
        assert_eq!(parse("7.2-rc1"), (7, 2));
        assert_eq!(parse("strange"), (0, 0));
        assert!(kernel_version() > (2, 6));
    }
}
