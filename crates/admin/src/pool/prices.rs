//! Monthly cost of a pool in an object store, by a list of prices: the pool's property `prices`.
//!
//! Callers: `set` of the property, and `status`. Pure.

use nacre_pool::backend::Requests;

/// The property.
pub(crate) const PRICES: &str = "prices";
/// A month, seconds.
const MONTH: f64 = 30.0 * 86400.0;
/// Minimum time by which counted requests are extrapolated, seconds.
const SHORTEST: u64 = 60;
const GIB: f64 = (1_u64 << 30) as f64;

/// Prices of a thousand requests, and of a GiB stored for a month, sent, and received.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    put: f64,
    get: f64,
    list: f64,
    delete: f64,
    stored: f64,
    sent: f64,
    received: f64,
}

impl Default for Prices {
    /// Prices of S3 Standard in us-east-1, to machines outside of Amazon; US dollars.
    fn default() -> Self {
        Self { put: 0.005, get: 0.0004, list: 0.005, delete: 0.0, stored: 0.023, sent: 0.0, received: 0.09 }
    }
}

/// The cost of a month.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MonthCost {
    /// For stored data.
    pub stored: f64,
    /// For requests and their traffic, if they continue at the rate since the import.
    pub requests: f64,
}

impl Prices {
    /// Parses a list like `put=0.005,stored=0.02`; prices that it does not name have their defaults.
    ///
    /// # Errors
    /// The list is invalid; the text describes the error.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut prices = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            let of = match name {
                "put" => &mut prices.put,
                "get" => &mut prices.get,
                "list" => &mut prices.list,
                "delete" => &mut prices.delete,
                "stored" => &mut prices.stored,
                "sent" => &mut prices.sent,
                "received" => &mut prices.received,
                _ => {
                    return Err(format!(
                        "'{name}' is none of put, get, list, delete (a thousand), stored (a GiB and month), sent, received (a GiB)"
                    ));
                }
            };
            let price = value.parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
            *of = price.ok_or_else(|| format!("'{value}' is no price"))?;
        }
        Ok(prices)
    }

    /// Returns the cost of a month, with so many stored bytes, and these requests in so many seconds.
    #[must_use]
    pub fn month(&self, stored: u64, asked: &Requests, since: u64) -> MonthCost {
        let of = |count: u64, price: f64| count as f64 * price;
        let requests = of(asked.puts, self.put)
            + of(asked.gets, self.get)
            + of(asked.lists, self.list)
            + of(asked.deletes, self.delete);
        let carried = of(asked.sent, self.sent) + of(asked.received, self.received);
        let so_far = requests / 1000.0 + carried / GIB;
        MonthCost { stored: of(stored, self.stored) / GIB, requests: so_far * MONTH / since.max(SHORTEST) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let prices = Prices::parse("put=1, received=0").unwrap();
        assert_eq!(prices, Prices { put: 1.0, received: 0.0, ..Prices::default() });
        assert_eq!(Prices::parse("").unwrap(), Prices::default());
        for wrong in ["put", "put=x", "put=-1", "put=inf", "post=1"] {
            assert!(Prices::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_month_costs_what_it_would_cost_so() {
        let prices = Prices::parse("put=2,get=1,list=0,delete=0,stored=3,sent=0,received=5").unwrap();
        let asked = Requests { puts: 1000, gets: 2000, received: 1 << 30, ..Requests::default() };
        // A tenth of a month.
        let month = prices.month(2 << 30, &asked, 3 * 86400);
        assert_eq!((month.stored, month.requests), (6.0, 90.0));
        // Soon after the import as well, but for the first minute.
        assert_eq!(prices.month(0, &asked, 60).requests, 60.0 * prices.month(0, &asked, 3600).requests);
        assert_eq!(prices.month(0, &asked, 1), prices.month(0, &asked, 60));
    }
}
